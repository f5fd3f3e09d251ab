"""Compare two processes on two cores with a single process. See README.md in this folder.

python -m benchmarks.two_cores --save
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.two_cores.aims import aims_markdown
from benchmarks.two_cores.launch import Place, places, run_workers
from benchmarks.two_cores.ours import UNSTASHED, Ours
from benchmarks.two_cores.stashing import StashMemory, stash_memory
from benchmarks.two_cores.table import Sample, markdown
from planner.formats.plan import load_plan

BATCH_SIZES = {"transformer": 16, "vgg_like": 32}
SYNCHRONOUS: tuple[str, ...] = ("1f1b-flush", "zb-h1")
TIMEOUT_S = 240.0
HERE = Path(__file__).parent
README, RESULTS, MARKER = HERE / "README.md", HERE / "results.json", "<!-- result -->"


@dataclass(frozen=True)
class Contender:
    """One way to train, and how to measure its samples/s once."""

    name: str
    measure: Callable[[], dict[str, Any]]


def main() -> None:
    """Measure every contender once per round, in turn, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(BATCH_SIZES), default=sorted(BATCH_SIZES))
    parser.add_argument("--networks", nargs="+", default=["loopback", "1gbit"], help="loopback, or a rate for tc")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16], help="of the synchronous schedules")
    parser.add_argument("--gpipe", action="store_true", help="measure GPipe, too: torch's and ours")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measured window")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose name starts with one of these")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory of weight stashing")
    parser.add_argument("--save", action="store_true", help="write results.json, and the tables into the README")
    arguments = parser.parse_args()
    samples: list[Sample] = []
    memory: list[StashMemory] = []
    with tempfile.TemporaryDirectory(prefix="two_cores-") as folder:
        for model in arguments.models:
            for link in arguments.networks:
                # Contenders that hardly depend on the network are measured only over the first one.
                whole = link == arguments.networks[0]
                counts = arguments.microbatches if whole else arguments.microbatches[:1]
                with places(link) as where:
                    ours = Ours(model, link, BATCH_SIZES[model], where, arguments.seconds, Path(folder), TIMEOUT_S)
                    contenders = _contenders(ours, counts, whole=whole, gpipe=arguments.gpipe)
                    chosen = [each for each in contenders if each.name.startswith(tuple(arguments.only))]
                    samples += _measure(ours, chosen, arguments.rounds)
            if not arguments.no_memory:
                memory.append(stash_memory(model, BATCH_SIZES[model], Path(folder)))
    environment = _environment()
    tables = f"{_described(environment, arguments)}\n\n{aims_markdown(samples, memory)}\n\n{markdown(samples)}"
    print(tables)
    if arguments.save:
        content = {
            "environment": environment,
            "samples": [vars(sample) for sample in samples],
            "memory": [vars(each) for each in memory],
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        README.write_text(f"{head}{MARKER}\n\n{tables}\n", encoding="utf-8")


def _contenders(ours: Ours, counts: Sequence[int], *, whole: bool, gpipe: bool) -> list[Contender]:
    """Return all ways to train the model between the two places, for one table."""
    where, batch_size = ours.where, ours.batch_size
    asynchronous = ours.straight("1f1b", 1)
    cut = ours.cut(asynchronous)

    def baseline(name: str, contestants: Sequence[Place], **options: int) -> Callable[[], dict[str, Any]]:
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        flags += ["--model", ours.model, "--batch-size", str(batch_size), "--seconds", str(ours.seconds)]
        return lambda: run_workers(contestants, "benchmarks.two_cores.worker", [name, *flags], ours.timeout_s)

    found = [Contender("one process", baseline("plain", where[:1]))]
    if whole:
        found.append(Contender("two processes that share nothing", baseline("plain", where)))
    found += [
        Contender("DDP", baseline("ddp", where)),
        Contender("DDP, a minibatch on each", baseline("ddp-each", where)),
        Contender("ours 1f1b", partial(ours.train, asynchronous)),
    ]
    if whole:
        found.append(Contender("ours 1f1b, weights not stashed", partial(ours.train, asynchronous, UNSTASHED)))
    solved = ours.solved()
    if load_plan(solved).config != load_plan(asynchronous).config:
        found.append(Contender(f"ours as solved ({load_plan(solved).config})", partial(ours.train, solved)))
    schedules: tuple[str, ...] = (*SYNCHRONOUS, "gpipe") if gpipe else SYNCHRONOUS
    for count in counts:
        options = {"cut": cut, "microbatches": count}
        found.append(Contender(f"torch 1F1B, {count} microbatches", baseline("torch-1f1b", where, **options)))
        if gpipe:
            found.append(Contender(f"torch GPipe, {count} microbatches", baseline("torch-gpipe", where, **options)))
        for schedule in schedules:
            plan = ours.straight(schedule, count)
            found.append(Contender(f"ours {schedule}, {count} microbatches", partial(ours.train, plan)))
    return found


def _measure(ours: Ours, contenders: Sequence[Contender], rounds: int) -> list[Sample]:
    """Measure every contender once per round; rounds start with different ones, so that none is always first."""
    samples = []
    for index in range(rounds):
        shift = index * len(contenders) // rounds
        for contender in (*contenders[shift:], *contenders[:shift]):
            result = contender.measure()
            sample = Sample(
                ours.model,
                ours.network,
                contender.name,
                index,
                result["samples_per_s"],
                result.get("predicted_samples_per_s"),
                first_stage_s(result),
            )
            samples.append(sample)
            print(
                f"{ours.model}, {ours.network}, round {index + 1}/{rounds}: {contender.name} "
                f"{result['samples_per_s']:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return samples


def first_stage_s(result: Mapping[str, Any]) -> float | None:
    """Return the first stage's computing seconds per minibatch, from `plan train`; None for a baseline."""
    if "reports" not in result:
        return None
    report = next(each for each in result["reports"] if each["stage"] == 0)
    seconds: float = report["busy_share"] * result["minibatch_size"] / report["samples_per_s"]
    return seconds


def _described(environment: Mapping[str, str], arguments: argparse.Namespace) -> str:
    """Return a sentence about what the tables belong to."""
    return (
        f"{environment['date']}: {environment['cpu']}, {environment['system']}, Python {environment['python']}, torch "
        f"{environment['torch']}, gloo. Samples/s, medians of {arguments.rounds} windows of {arguments.seconds:g} s."
    )


def _environment() -> dict[str, str]:
    """Return the machine and versions that the numbers belong to."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{len(models)} x {models[0].split(': ')[1]}" if models else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": Path("/proc/loadavg").read_text().split()[0],
    }


if __name__ == "__main__":
    main()
