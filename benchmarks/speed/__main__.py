"""Time `plan solve`, `plan simulate` and `plan profile` on large questions. See README.md here.

python -m benchmarks.speed --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import ROOT, printed
from benchmarks.processes import Process, plan
from benchmarks.speed.graphs import chain
from planner.formats.profile import save_profile

LAYERS = (100, 300, 1000, 3000)
GPUS = (8, 128, 2048, 16384)
SIMULATED = (  # stages, replicas, schedule, microbatches, minibatches
    (16, 1, "1f1b", 1, 1000),
    (2, 8, "1f1b", 1, 1000),
    (16, 1, "gpipe", 16, 100),
    (1024, 1, "1f1b", 1, 100),
    (128, 8, "1f1b-flush", 8, 100),
)
PROFILED = (("vgg16", 32), ("resnet50", 16))  # model under profiles/, samples

Row = tuple[str, Process]


def main() -> int:
    """Run every command in a process of its own, and print a table of what each took."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=VERBS, default=list(VERBS), help="these verbs")
    parser.add_argument("--save", action="store_true", help="write the table to results.md here")
    arguments = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for verb in arguments.only:
            for question, took in VERBS[verb](Path(folder)):
                rows.append(
                    (
                        f"plan {verb}",
                        question,
                        f"{took.wall_s:.2f}",
                        f"{took.cpu_s:.2f}",
                        f"{took.peak_bytes / 1e6:.0f}",
                    )
                )
                print(*rows[-1], file=sys.stderr, flush=True)

    headers = ("verb", "question", "seconds", "of the processor", "peak, MB")
    with printed(Path(__file__).parent, save=arguments.save):
        print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return 0


def _solve(folder: Path) -> Iterator[Row]:
    for layers in LAYERS:
        profile = folder / f"chain-{layers}.json"
        save_profile(chain(layers), profile)
        for gpus in GPUS:
            took = plan(
                "solve",
                *("--profile", profile, "--gpus", str(gpus), "--bandwidth", "10Gbps"),
                *("--depth", "published", "-o", folder / "solved.json"),
            )
            yield f"{layers:,} layers on {gpus:,} GPUs", took


def _simulate(folder: Path) -> Iterator[Row]:
    for stages, replicas, schedule, microbatches, minibatches in SIMULATED:
        profile, priced = folder / "simulated-profile.json", folder / "simulated.json"
        save_profile(chain(stages), profile)
        plan(
            "price",
            *("--profile", profile, "--gpus", str(stages * replicas), "--bandwidth", "10Gbps"),
            *("--stages", str(stages), "--replicas", str(replicas)),
            *("--schedule", schedule, "--microbatches", str(microbatches), "-o", priced),
        )
        took = plan("simulate", "--plan", priced, "--minibatches", str(minibatches))
        shape = f"{stages} stages x {replicas}, {schedule} x{microbatches}"
        yield f"{shape}, {minibatches:,} minibatches", took


def _profile(folder: Path) -> Iterator[Row]:
    for model, samples in PROFILED:
        path = ROOT / "profiles" / model / "model.py"
        took = plan("profile", path, "--batch-size", str(samples), "-o", folder / "profile.json")
        yield f"{model}, {samples} samples", took


VERBS = {"solve": _solve, "simulate": _simulate, "profile": _profile}


if __name__ == "__main__":
    sys.exit(main())
