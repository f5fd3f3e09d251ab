"""What copies cost while nothing fails: windows of one run that begin with a copy, and the windows
between them.

What a copy takes is the difference of two windows that follow each other. Short windows tell it
well: of the noise of the machine they have little, and all of the copy, which ends within a window.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.elastic.faults import cluster, write_plan
from planner.analysis.fewer import COPY_EVERY

WINDOW = 12  # minibatches
PAIRS = 30
WARM_UP = 3  # pairs that are left out: the first copy takes its memory
WIDTHS = (16, 1024)  # of the model's layers


def measure_copies(hosts: int) -> list[dict[str, str]]:
    """Return a row for each width of layers: the seconds of a copy, and their share of the usual
    distance of copies.
    """
    rows = []
    for width in WIDTHS:
        with_copy, without = _windows(hosts, width)
        costs = [one - other for one, other in zip(with_copy, without, strict=True)]
        mean_s, error_s = statistics.mean(costs), statistics.stdev(costs) / math.sqrt(len(costs))
        between_s = COPY_EVERY * statistics.mean(without) / WINDOW
        state_bytes = 3 * 4 * (10 * (width + 1) * width)  # of the blocks: weights and two moments
        rows.append(
            {
                "state": f"{state_bytes / 1e6:.2g} MB",
                "s per minibatch": f"{statistics.mean(without) / WINDOW:.3f}",
                "ms of a copy": f"{mean_s * 1e3:.0f} ± {error_s * 1e3:.0f}",
                f"of {COPY_EVERY} minibatches": f"{mean_s / between_s:.2%} ± "
                f"{error_s / between_s:.2%}",
                "pairs": str(len(costs)),
            }
        )
    return rows


def _windows(hosts: int, width: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each window that begins with a copy, and of each that follows one."""
    steps = 2 * WINDOW * (PAIRS + WARM_UP + 1)
    with (
        tempfile.TemporaryDirectory(prefix="elastic-") as name,
        patch.dict(os.environ, ELASTIC_WIDTH=str(width)),
    ):
        folder = Path(name)
        write_plan(hosts, 1, folder)
        with cluster(hosts, steps, folder, ("--copy-every", str(2 * WINDOW))) as found:
            while not found.ended:
                time.sleep(0.2)
            at_s = {each.minibatch: each.at_s for each in found.updates()}
    begins = range(2 * WINDOW * (1 + WARM_UP), steps, 2 * WINDOW)
    with_copy = [at_s[begin + WINDOW] - at_s[begin] for begin in begins]
    return with_copy, [at_s[begin + 2 * WINDOW] - at_s[begin + WINDOW] for begin in begins]
