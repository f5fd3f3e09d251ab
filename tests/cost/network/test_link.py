"""Links and all-reduces, by hand."""

from __future__ import annotations

import pytest

from planner.cost.network.link import Link, ring_all_reduce_s


def test_ring_all_reduce() -> None:
    # 3 workers, 60 bytes: each sends 2·2/3 of them in 4 steps.
    assert ring_all_reduce_s(60, 3, Link(10.0, 0.5)) == pytest.approx(8 + 2)
    assert ring_all_reduce_s(60, 1, Link(10.0, 0.5)) == 0
    assert ring_all_reduce_s(0, 3, Link(10.0, 0.5)) == 0
