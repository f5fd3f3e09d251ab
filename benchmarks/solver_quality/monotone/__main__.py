"""Count how often more GPUs, bandwidth or memory make a prediction worse. See README.md in this
folder.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import printed
from benchmarks.solver_quality.drawn_chain import chain, layer
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.solver import search_plan as solve

FACTORS = (1.0, 1.05, 1.3, 2.0)
_SAME = 1e-9

Case = tuple[int, float, int | None]  # GPUs, bytes/s, bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Solve random models and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver_quality.monotone", description=__doc__
    )
    parser.add_argument(
        "--models", type=int, default=1000, help="random models per row (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    args = parser.parse_args(argv)
    rows = [_row(name, steps, args.models, args.seed) for name, steps in STEPS.items()]
    headers = ["more", "models", "steps", "worse", "share", "worst", "CPU seconds"]
    with printed(Path(__file__).parent, save=args.save):
        print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return 0


def _row(
    name: str, steps: Callable[[random.Random, Profile], Iterator[Case]], models: int, seed: int
) -> list[str]:
    rng, started = random.Random(seed), time.process_time()
    ratios: list[float] = []
    for _ in range(models):
        model = random_model(rng)
        latency_s = rng.choice((0.0, 0.0, 0.1))
        times = [_seconds(model, case, latency_s) for case in steps(rng, model)]
        ratios += [more / less for less, more in pairwise(times) if math.isfinite(less)]
    worse = [ratio for ratio in ratios if ratio > 1 + _SAME]
    return [
        name,
        str(models),
        str(len(ratios)),
        str(len(worse)),
        f"{len(worse) / len(ratios):.2%}",
        f"+{max(worse, default=1.0) - 1:.1%}",
        f"{time.process_time() - started:.0f}",
    ]


def _seconds(model: Profile, case: Case, latency_s: float) -> float:
    gpus, bandwidth, memory = case
    try:
        plan = solve(model, flat_cluster(gpus, bandwidth, memory, latency_s))
    except InfeasibleError:
        return math.inf
    return plan.predicted.seconds_per_minibatch


def _more_gpus(rng: random.Random, model: Profile) -> Iterator[Case]:
    gpus, bandwidth, memory = rng.randint(1, 12), _bandwidth(rng), _memory(rng, model)
    limit = None if rng.random() < 0.5 else memory
    return ((gpus + more, bandwidth, limit) for more in range(4))


def _more_bandwidth(rng: random.Random, model: Profile) -> Iterator[Case]:
    gpus, bandwidth, memory = rng.randint(1, 12), _bandwidth(rng), _memory(rng, model)
    limit = None if rng.random() < 0.5 else memory
    return ((gpus, bandwidth * factor, limit) for factor in FACTORS)


def _more_memory(rng: random.Random, model: Profile) -> Iterator[Case]:
    gpus, bandwidth, memory = rng.randint(1, 12), _bandwidth(rng), _memory(rng, model)
    yield from ((gpus, bandwidth, int(memory * factor)) for factor in FACTORS)
    yield gpus, bandwidth, None


STEPS = {"GPUs": _more_gpus, "bandwidth": _more_bandwidth, "memory": _more_memory}


def _bandwidth(rng: random.Random) -> float:
    """Return a bandwidth over which a transfer takes from ten times a layer's time to almost
    nothing.
    """
    return float(10 ** rng.uniform(-1, 1.5))


def _memory(rng: random.Random, model: Profile) -> int:
    """Return a memory limit: from a third of what one GPU needs for the whole model to several
    times that.
    """
    return max(
        1,
        int(
            sum(3 * each.weight_bytes + 2 * each.saved_bytes for each in model.layers)
            * rng.uniform(0.3, 3)
        ),
    )


def random_model(rng: random.Random) -> Profile:
    """Return a chain of 2 to 13 layers with uneven times, outputs and weights; half of the layers
    have no weights.
    """
    layers = []
    for number in range(rng.randint(2, 13)):
        forward_s, output_bytes = float(rng.randint(1, 19)), rng.randint(1, 39)
        layers.append(
            layer(f"l{number}", forward_s, output_bytes, rng.randint(0, 59) * rng.randint(0, 1))
        )
    return chain(layers, "benchmarks.solver_quality.monotone")


if __name__ == "__main__":
    sys.exit(main())
