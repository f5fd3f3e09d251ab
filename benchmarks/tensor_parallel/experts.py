"""Compare predictions with emulated runs of groups of two and of four ranks that divide experts.
See README.md.

python -m benchmarks.tensor_parallel.experts --seed 1 --save
"""

from __future__ import annotations

import random

from benchmarks.tensor_parallel import levels
from benchmarks.tensor_parallel.levels import DEVICES, NAMES, RATES, Case

MODEL = next(model for model, name in NAMES.items() if name == "experts")
SAMPLES = (8, 16, 32)
# Replicas and ranks of each stage, and the schedule.
PLANS = (
    ((1,), 2, "1f1b"),
    ((1,), 4, "1f1b"),
    ((2,), 2, "1f1b-flush"),
    ((1, 1), 2, "1f1b"),
    ((1,), 4, "gpipe"),
    ((1, 1), 2, "1f1b-flush"),
)


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    levels.compare_cases(__doc__, "experts", draw, cases=len(PLANS))


def draw(seed: int, count: int) -> list[Case]:
    """Return each plan with samples, a device and links drawn at random; each GPU is a host."""
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        replicas, degree, schedule = PLANS[number % len(PLANS)]
        case = Case(
            model=MODEL,
            samples=rng.choice(SAMPLES),
            device=rng.choice(DEVICES),
            hosts=degree * sum(replicas),
            rates=(rng.choice(RATES),),
            replicas=replicas,
            schedule=schedule,
            microbatches=1 if schedule == "1f1b" else 4,
            faster=2,
            degrees=(degree,) * len(replicas),
        )
        cases.append(case)
    return cases


if __name__ == "__main__":
    main()
