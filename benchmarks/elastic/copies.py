"""What copies cost while nothing fails: the same run with and without them, window by window."""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.elastic.faults import cluster, write_plan

WINDOWS = 12  # of so many minibatches each, between whose ends there is one copy
WINDOW = 50
WARM_UP = 2  # windows that are left out: of the start, and of the first copy, which takes its memory


def measure_copies(hosts: int) -> list[dict[str, str]]:
    """Return a row for each pair of runs on so many hosts: seconds per window with copies and without, and the cost."""
    rows = []
    for pair in range(2):
        medians = {every: statistics.median(_windows(hosts, every)) for every in _order(pair)}
        with_copies, without = medians[WINDOW], medians[10**6]
        rows.append(
            {
                "pair": str(pair + 1),
                "s per window with a copy": f"{with_copies:.3f}",
                "without": f"{without:.3f}",
                "cost": f"{with_copies / without - 1:+.1%}",
            }
        )
    return rows


def _order(pair: int) -> tuple[int, int]:
    return (WINDOW, 10**6) if pair % 2 == 0 else (10**6, WINDOW)


def _windows(hosts: int, every: int) -> list[float]:
    """Return the seconds of each window of a run."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        write_plan(hosts, 1, folder)
        with cluster(hosts, WINDOWS * WINDOW, folder, ("--copy-every", str(every))) as found:
            while not found.ended:
                time.sleep(0.2)
            ends = [at_s for _, _, at_s, minibatch, _ in found.updates() if minibatch % WINDOW == 0]
    return [later - earlier for earlier, later in pairwise(ends)][WARM_UP - 1 :]
