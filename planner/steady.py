"""Which part of a run is its steady state."""

from __future__ import annotations


def steady_range(completions: int, period: int = 1) -> tuple[int, int]:
    """Two completions, by number, between which the pipeline is in its steady state; 0 and 0 for runs too short.

    The first half of the run may still be filling the pipeline, its last eighth draining it.

    Args:
        completions: how many the run had.
        period: completions come in bursts of this many; the two are whole periods apart.
    """
    first = completions // 2
    periods = (completions - completions // 8 - 1 - first) // period
    return (first, first + periods * period) if periods > 0 else (0, 0)
