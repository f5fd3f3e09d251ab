"""Compare predictions with emulated runs of groups of two ranks, in two hosts, under every
schedule. See README.md.

python -m benchmarks.tensor_parallel.schedules --seed 1 --save
"""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.tensor_parallel import levels
from benchmarks.tensor_parallel.levels import RANKS, Case
from planner.schedule.registry import SCHEDULES

HOSTS = 2
NAMES = [each.name for each in SCHEDULES if not each.chunked]


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    levels.compare_cases(__doc__, "schedules", draw, cases=len(NAMES) + 2)


def draw(seed: int, count: int) -> list[Case]:
    """Return each schedule with two stages of a group each, then plans whose stages are divided
    differently.
    """
    rng = random.Random(seed)
    drawn = levels.endless(rng)
    return [_changed(next(drawn), number, rng) for number in range(count)]


def _changed(case: Case, number: int, rng: random.Random) -> Case:
    by_group = number < len(NAMES)
    schedule = next(
        each for each in SCHEDULES if each.name == (NAMES[number] if by_group else "1f1b")
    )
    case = replace(
        case,
        hosts=HOSTS,
        replicas=(1, 1),
        schedule=schedule.name,
        microbatches=rng.choice((4, 8)) if schedule.divides else 1,
    )
    if by_group:
        return case
    mixed = ((RANKS, 1), (1, RANKS)) if number % 2 else ((1, RANKS), (RANKS, 1))
    return replace(
        case,
        hosts=RANKS * HOSTS,
        rates=case.rates[1:],
        faster=2,
        replicas=mixed[0],
        degrees=mixed[1],
    )


if __name__ == "__main__":
    main()
