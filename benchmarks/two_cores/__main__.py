"""How fast are two processes on two cores, against one? See README.md in this folder.

python -m benchmarks.two_cores --rounds 3 --seconds 8 -o results.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.two_cores.launch import Place, places, run_workers
from benchmarks.two_cores.ours import Ours
from benchmarks.two_cores.table import Sample, markdown
from planner.plan_file import ScheduleName, load_plan

BATCH_SIZES = {"transformer": 16, "vgg_like": 32}
MICROBATCHES = {"transformer": (4, 8), "vgg_like": (2, 4)}  # the better ones of 2, 4 and 8 for the baselines
SYNCHRONOUS: tuple[ScheduleName, ...] = ("1f1b-flush", "gpipe")
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Contender:
    """One way to train, and how to measure its samples/s once."""

    name: str
    measure: Callable[[], dict[str, Any]]


def main() -> None:
    """Measure every contender once per round, interleaved, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(BATCH_SIZES), default=sorted(BATCH_SIZES))
    parser.add_argument("--networks", nargs="+", default=["loopback", "1gbit"], help="loopback, or a rate for tc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measured window")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose name starts with one of these")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write every sample as JSON")
    arguments = parser.parse_args()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="two_cores-") as folder:
        for model in arguments.models:
            for link in arguments.networks:
                with places(link) as where:
                    contenders = _contenders(model, link, where, arguments.seconds, Path(folder))
                    chosen = [
                        c for c in contenders if arguments.only is None or c.name.startswith(tuple(arguments.only))
                    ]
                    samples += _measure(model, link, chosen, arguments.rounds)
    if arguments.output is not None:
        content = {"environment": _environment(), "samples": [vars(sample) for sample in samples]}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(_environment()))
    print(markdown(samples))


def _contenders(model: str, link: str, where: Sequence[Place], seconds: float, folder: Path) -> list[Contender]:
    """All ways to train `model` between the two places, for one table."""
    batch_size = BATCH_SIZES[model]
    ours = Ours(model, link, batch_size, where, seconds, folder, TIMEOUT_S)
    asynchronous = ours.straight("1f1b", 1)
    solved = ours.solved()
    cut = ours.cut(asynchronous)

    def baseline(name: str, contestants: Sequence[Place], **options: int) -> Callable[[], dict[str, Any]]:
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        flags += ["--model", model, "--batch-size", str(batch_size), "--seconds", str(seconds)]
        return lambda: run_workers(contestants, "benchmarks.two_cores.worker", [name, *flags], TIMEOUT_S)

    found = [
        Contender("one process", baseline("plain", where[:1])),
        Contender("two processes that share nothing", baseline("plain", where)),
        Contender("DDP", baseline("ddp", where)),
        Contender("DDP, a minibatch on each", baseline("ddp-each", where)),
        Contender("ours 1f1b", partial(ours.train, asynchronous)),
        Contender(f"ours as solved ({load_plan(solved).config})", partial(ours.train, solved)),
    ]
    for count in MICROBATCHES[model]:
        torch_options = {"cut": cut, "microbatches": count}
        found += [
            Contender(f"torch 1F1B, {count} microbatches", baseline("torch-1f1b", where, **torch_options)),
            Contender(f"torch GPipe, {count} microbatches", baseline("torch-gpipe", where, **torch_options)),
            Contender(
                f"ours 1f1b-flush, {count} microbatches", partial(ours.train, ours.straight("1f1b-flush", count))
            ),
            Contender(f"ours gpipe, {count} microbatches", partial(ours.train, ours.straight("gpipe", count))),
        ]
    return found


def _measure(model: str, link: str, contenders: Sequence[Contender], rounds: int) -> list[Sample]:
    """Every contender once per round; each round starts with another one, so that none is always first."""
    samples = []
    for index in range(rounds):
        shift = index * len(contenders) // rounds
        for contender in (*contenders[shift:], *contenders[:shift]):
            result = contender.measure()
            predicted = result.get("predicted_samples_per_s")
            samples.append(Sample(model, link, contender.name, index, result["samples_per_s"], predicted))
            print(
                f"{model}, {link}, round {index + 1}/{rounds}: {contender.name} {result['samples_per_s']:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return samples


def _environment() -> dict[str, str]:
    """What the numbers belong to."""
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
