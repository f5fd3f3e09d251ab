"""Work of stages, for the tests of the cost models."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from planner.cost.work import Work


def work(**given: float) -> Work:
    names = (
        "forward_s",
        "backward_s",
        "update_s",
        "trainable_bytes",
        "received_bytes",
        "sent_bytes",
    )
    more = ("received_messages", "sent_messages", "accumulate_s")
    return Work(**{name: np.array([float(given.get(name, 0.0))]) for name in names + more})


EXAMPLE = work(
    forward_s=2,
    backward_s=4,
    update_s=1,
    trainable_bytes=60,
    received_bytes=30,
    sent_bytes=20,
    received_messages=2,
    sent_messages=1,
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
    accumulate_s=amounts,
)
