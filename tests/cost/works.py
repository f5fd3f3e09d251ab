"""Work of stages, for the tests of the cost models."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from planner.cost.work import Work


def work(**given: float) -> Work:
    names = ("forward_s", "backward_s", "update_s", "trainable_bytes", "received_bytes", "sent_bytes")
    more = ("received_messages", "sent_messages", "cut_before_bytes", "cut_after_bytes", "accumulate_s")
    values = {name: np.array([float(given.get(name, 0.0))]) for name in names + more}
    return Work(**values, is_first=np.array([bool(given.get("is_first", False))]))


EXAMPLE = work(
    forward_s=2,
    backward_s=4,
    update_s=1,
    trainable_bytes=60,
    received_bytes=30,
    sent_bytes=20,
    received_messages=2,
    sent_messages=1,
    cut_before_bytes=40,
    cut_after_bytes=50,
)


amounts = st.integers(0, 60).map(float)
works = st.builds(
    work,
    forward_s=amounts,
    backward_s=amounts,
    update_s=amounts,
    trainable_bytes=amounts,
    received_bytes=amounts,
    sent_bytes=amounts,
    received_messages=st.integers(0, 4),
    sent_messages=st.integers(0, 4),
    cut_before_bytes=amounts,
    cut_after_bytes=amounts,
    accumulate_s=amounts,
    is_first=st.booleans(),
)
