"""Workers that are started to measure the links of this host."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.profiler.links.measure_host import measure_host


@pytest.mark.slow
def test_links_between_workers_of_this_host() -> None:
    cluster = measure_host(2, "cpu")
    assert cluster.backend == "gloo"
    (level,) = cluster.levels
    assert level.size == 2
    assert level.bandwidth_bytes_per_s > 1e6


def test_what_the_workers_refuse_is_told() -> None:
    with pytest.raises(InputError, match=r"`backend=nccl` sends from GPUs.*\nhint: leave out `backend`"):
        measure_host(2, "cpu", "nccl")
