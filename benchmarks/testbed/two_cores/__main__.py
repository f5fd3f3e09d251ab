"""Compare two processes on two cores with a single process. See README.md in this folder.

python -m benchmarks.testbed.two_cores --save
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import environment
from benchmarks.testbed.two_cores.launch import Place, places
from benchmarks.testbed.two_cores.ours import Ours
from benchmarks.testbed.two_cores.table import ASYNCHRONOUS, DDP, ONE_PROCESS, Sample, markdown
from benchmarks.testbed.two_cores.turns import Contender, take_turns
from planner.formats.plan import load_plan

BATCH_SIZES = {"transformer": 16, "vgg_like": 32}
SYNCHRONOUS: tuple[str, ...] = ("1f1b-flush", "zb-h1")
HERE = Path(__file__).parent
README, RESULTS, MARKER = HERE / "README.md", HERE / "results.json", "<!-- result -->"


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
    parser.add_argument("--gpipe", action="store_true", help="measure GPipe, too: torch's and ours")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="for all of it, on a quiet machine"
    )
    parser.add_argument("--window", type=float, default=0.5, help="seconds of a turn")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="contenders whose name starts with one of these"
    )
    parser.add_argument(
        "--save", action="store_true", help="write results.json, and the tables into the README"
    )
    arguments = parser.parse_args()
    began_s, done, every = time.monotonic(), 0, len(arguments.models) * len(arguments.networks)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="two_cores-") as name:
        folder = Path(name)
        for model in arguments.models:
            for link in arguments.networks:
                # Contenders that hardly depend on the network are measured only over the first one.
                whole = link == arguments.networks[0]
                counts = arguments.microbatches if whole else arguments.microbatches[:1]
                with places(link) as where:
                    ours = Ours(model, link, BATCH_SIZES[model], where, folder)
                    groups = _groups(ours, counts, whole=whole, gpipe=arguments.gpipe)
                    done += 1
                    until_s = began_s + arguments.minutes * 60 * done / every
                    for group, end_s in _shares(_chosen(groups, arguments.only), until_s):
                        samples += _measure(ours, group, end_s, arguments.window)
    about = (
        f"{time.strftime('%Y-%m-%d')}, {environment()}. Samples/s, medians and quartiles of cycles "
        f"with two turns of {arguments.window:g} s for each contender."
    )
    tables = f"{about}\n\n{markdown(samples)}"
    print(tables)
    if arguments.save:
        content = {"environment": about, "samples": [vars(sample) for sample in samples]}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        README.write_text(f"{head}{MARKER}\n\n{tables}\n", encoding="utf-8")


def compare(
    model: str, network_name: str, minutes: float, *, counts: Sequence[int], window_s: float = 0.5
) -> list[Sample]:
    """Let DDP, torch's 1F1B and ours take turns on one model, and return a sample per contender and
    cycle.
    """
    names = (ONE_PROCESS, DDP, ASYNCHRONOUS, "torch 1F1B", "ours 1f1b-flush")
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="two_cores-") as folder, places(network_name) as where:
        ours = Ours(model, network_name, BATCH_SIZES[model], where, Path(folder))
        groups = _chosen(_groups(ours, counts, whole=False, gpipe=False), names)
        for group, end_s in _shares(groups, time.monotonic() + minutes * 60):
            samples += _measure(ours, group, end_s, window_s)
    return samples


def _groups(ours: Ours, counts: Sequence[int], *, whole: bool, gpipe: bool) -> list[Group]:
    """Return all ways to train the model between the two places, for one table."""
    where, batch_size = ours.where, ours.batch_size
    asynchronous = ours.straight("1f1b", 1)
    cut = ours.cut(asynchronous)

    def baseline(
        name: str, kind: str, contestants: Sequence[Place] = where, **options: int
    ) -> Contender:
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        flags += ["--model", ours.model, "--batch-size", str(batch_size)]
        command = ("benchmarks.testbed.two_cores.worker", kind, *flags)
        return Contender(name, contestants, command, batch_size, all_mark=kind == "plain")

    found = [baseline("one process", "plain", where[:1])]
    if whole:
        found.append(baseline("two processes that share nothing", "plain"))
    found += [
        baseline("DDP", "ddp"),
        baseline("DDP, a minibatch on each", "ddp-each"),
        ours.training(ASYNCHRONOUS, asynchronous),
    ]
    solved = ours.solved()
    if load_plan(solved).config != load_plan(asynchronous).config:
        found.append(ours.training(f"ours as solved ({load_plan(solved).config})", solved))
    groups = [Group("whole minibatches", found)]
    schedules: tuple[str, ...] = (*SYNCHRONOUS, "gpipe") if gpipe else SYNCHRONOUS
    for count in counts:
        divided = [
            baseline(f"torch 1F1B, {count} microbatches", "torch-1f1b", cut=cut, microbatches=count)
        ]
        if gpipe:
            name = f"torch GPipe, {count} microbatches"
            divided.append(baseline(name, "torch-gpipe", cut=cut, microbatches=count))
        for schedule in schedules:
            name = f"ours {schedule}, {count} microbatches"
            divided.append(ours.training(name, ours.straight(schedule, count)))
        groups.append(Group(f"{count} microbatches", divided))
    return groups


def _chosen(groups: Sequence[Group], prefixes: Sequence[str]) -> list[Group]:
    """Return the groups of at least two contenders whose names start with one of `prefixes`; else
    the first of one.
    """
    kept = [
        Group(g.name, [c for c in g.contenders if c.name.startswith(tuple(prefixes))])
        for g in groups
    ]
    several = [group for group in kept if len(group.contenders) > 1]
    return several or [group for group in kept if group.contenders][:1]


def _shares(groups: Sequence[Group], until_s: float) -> Iterator[tuple[Group, float]]:
    """Yield each group with the time when its turns end: what is left is shared by the number of
    contenders.
    """
    for index, group in enumerate(groups):
        left = sum(len(each.contenders) for each in groups[index:])
        now_s = time.monotonic()
        yield group, now_s + (until_s - now_s) * len(group.contenders) / left


def _measure(ours: Ours, group: Group, until_s: float, window_s: float) -> Iterator[Sample]:
    """Yield a sample per contender and cycle."""
    windows = list(take_turns(group.contenders, ours.folder, until_s, window_s))
    for cycle in sorted({window.cycle for window in windows}):
        for contender in group.contenders:
            mine = [w for w in windows if w.cycle == cycle and w.contender == contender.name]
            yield Sample(
                ours.model,
                ours.network,
                group.name,
                contender.name,
                cycle,
                statistics.mean(window.samples_per_s for window in mine),
                contender.predicted_samples_per_s,
                statistics.mean(window.first_stage_s for window in mine),
            )
    print(
        f"{ours.model}, {ours.network}, {group.name}: {len(windows)} windows",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
