"""Compare two processes on two cores with a single process. See README.md in this folder.

python -m benchmarks.testbed.two_cores --save
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import printed
from benchmarks.testbed.two_cores.launch import Place, places
from benchmarks.testbed.two_cores.ours import Ours
from benchmarks.testbed.two_cores.table import ASYNCHRONOUS, DDP, ONE_PROCESS, Sample, markdown
from benchmarks.testbed.two_cores.turns import Contender, take_turns

BATCH_SIZES = {"transformer": 16, "vgg_like": 32}
SYNCHRONOUS = ("1f1b-flush", "zb-h1")
HERE = Path(__file__).parent
WINDOW_S = 0.5


@dataclass(frozen=True)
class Group:
    """Contenders that are compared with each other, and so take turns."""

    name: str
    contenders: Sequence[Contender]


def main() -> None:
    """Let the contenders of each group take turns, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=sorted(BATCH_SIZES), default=sorted(BATCH_SIZES)
    )
    parser.add_argument(
        "--networks", nargs="+", default=["loopback", "1gbit"], help="loopback, or a rate for tc"
    )
    parser.add_argument(
        "--microbatches",
        nargs="+",
        type=int,
        default=[4, 8, 16],
        help="of the synchronous schedules",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="for all of it, on a quiet machine"
    )
    parser.add_argument("--save", action="store_true", help="write results.md")
    arguments = parser.parse_args()

    minutes = arguments.minutes / len(arguments.models) / len(arguments.networks)
    samples: list[Sample] = []
    for model in arguments.models:
        for network in arguments.networks:
            # Contenders that hardly depend on the network are measured only over the first one.
            whole = network == arguments.networks[0]
            counts = arguments.microbatches if whole else arguments.microbatches[:1]
            samples += compare(model, network, minutes, counts=counts)

    with printed(HERE, save=arguments.save):
        print(markdown(samples))


def compare(model: str, network: str, minutes: float, *, counts: Sequence[int]) -> list[Sample]:
    """Let one process, DDP, torch's 1F1B and ours take turns on one model; return a sample per
    contender and cycle.

    Args:
        model: in `BATCH_SIZES`.
        network: "loopback", or a rate for `tc`.
        minutes: for all of it.
        counts: microbatches of the synchronous schedules.
    """
    until_s = time.monotonic() + 60 * minutes
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="two_cores-") as folder, places(network) as where:
        ours = Ours(model, network, BATCH_SIZES[model], where, Path(folder))
        for group, end_s in _shares(_groups(ours, counts), until_s):
            samples += _measure(ours, group, end_s)
    return samples


def _groups(ours: Ours, counts: Sequence[int]) -> list[Group]:
    """Return all ways to train the model between the two places, for one table."""
    asynchronous = ours.straight("1f1b", 1)
    whole = Group(
        "whole minibatches",
        [
            _baseline(ours, ONE_PROCESS, "plain", ours.where[:1]),
            _baseline(ours, DDP, "ddp", ours.where),
            ours.training(ASYNCHRONOUS, asynchronous),
        ],
    )
    cut = str(ours.cut(asynchronous))
    return [whole, *(_divided(ours, count, cut) for count in counts)]


def _divided(ours: Ours, count: int, cut: str) -> Group:
    """Return the contenders that divide minibatches into so many microbatches."""
    flags = ("--cut", cut, "--microbatches", str(count))
    contenders = [
        _baseline(ours, f"torch 1F1B, {count} microbatches", "torch-1f1b", ours.where, *flags)
    ]
    for schedule in SYNCHRONOUS:
        name = f"ours {schedule}, {count} microbatches"
        contenders.append(ours.training(name, ours.straight(schedule, count)))
    return Group(f"{count} microbatches", contenders)


def _baseline(ours: Ours, name: str, kind: str, where: Sequence[Place], *flags: str) -> Contender:
    """Return a contender that `worker.py` trains."""
    command = (
        "benchmarks.testbed.two_cores.worker",
        kind,
        "--model",
        ours.model,
        "--batch-size",
        str(ours.batch_size),
        *flags,
    )
    return Contender(name, where, command, ours.batch_size)


def _shares(groups: Sequence[Group], until_s: float) -> Iterator[tuple[Group, float]]:
    """Yield each group with the time when its turns end: what is left is shared by the number of
    contenders.
    """
    for index, group in enumerate(groups):
        left = sum(len(each.contenders) for each in groups[index:])
        now_s = time.monotonic()
        yield group, now_s + (until_s - now_s) * len(group.contenders) / left


def _measure(ours: Ours, group: Group, until_s: float) -> Iterator[Sample]:
    """Yield a sample per contender and cycle."""
    windows = list(take_turns(group.contenders, ours.folder, until_s, WINDOW_S))
    for cycle in sorted({window.cycle for window in windows}):
        for contender in group.contenders:
            rates = [
                window.samples_per_s
                for window in windows
                if (window.cycle, window.contender) == (cycle, contender.name)
            ]
            yield Sample(
                ours.model,
                ours.network,
                group.name,
                contender.name,
                cycle,
                statistics.mean(rates),
                contender.predicted_samples_per_s,
            )
    print(
        f"{ours.model}, {ours.network}, {group.name}: {len(windows)} windows",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
