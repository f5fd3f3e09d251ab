"""What copies cost while nothing fails: windows of one run with a copy, and the windows between them."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.elastic.faults import cluster, write_plan

WINDOW = 50  # minibatches: the distance between copies that `plan train` has by default
PAIRS = 7
WARM_UP = 1  # pairs that are left out: the first copy takes its memory
WIDTHS = (16, 1024)  # of the model's layers


def measure_copies(hosts: int) -> list[dict[str, str]]:
    """Return a row for each width of layers: seconds per window with a copy and without, and the difference."""
    rows = []
    for width in WIDTHS:
        with_copy, without = _windows(hosts, width)
        costs = sorted(one / other - 1 for one, other in zip(with_copy, without, strict=True))
        state_bytes = 3 * 4 * (10 * (width + 1) * width)  # of the blocks: weights and two moments
        rows.append(
            {
                "state": f"{state_bytes / 1e6:.2g} MB",
                "s per window with a copy": f"{statistics.median(with_copy):.3f}",
                "without": f"{statistics.median(without):.3f}",
                "cost, median of pairs": f"{statistics.median(costs):+.2%}",
                "pairs from, to": f"{costs[0]:+.1%}, {costs[-1]:+.1%}",
            }
        )
    return rows


def _windows(hosts: int, width: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each window that begins with a copy, and of each that follows one."""
    steps = 2 * WINDOW * (PAIRS + WARM_UP + 1)
    with tempfile.TemporaryDirectory(prefix="elastic-") as name, patch.dict(os.environ, ELASTIC_WIDTH=str(width)):
        folder = Path(name)
        write_plan(hosts, 1, folder)
        with cluster(hosts, steps, folder, ("--copy-every", str(2 * WINDOW))) as found:
            while not found.ended:
                time.sleep(0.2)
            at_s = {each.minibatch: each.at_s for each in found.updates()}
    begins = range(2 * WINDOW * (1 + WARM_UP), steps, 2 * WINDOW)
    with_copy = [at_s[begin + WINDOW] - at_s[begin] for begin in begins]
    return with_copy, [at_s[begin + 2 * WINDOW] - at_s[begin + WINDOW] for begin in begins]
