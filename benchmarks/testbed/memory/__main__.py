"""Compare a stage's predicted memory with its worker's measured peak. See README.md in this folder.

python -m benchmarks.testbed.memory --save
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.kept import ROOT
from benchmarks.testbed.malloc import pages_returned
from benchmarks.testbed.memory.plans import Shape, shaped_plan
from planner.executor.worker import launch
from planner.formats.profile import Profile, load_profile
from planner.workers.job import Job

README, RESULTS = (Path(__file__).with_name(name) for name in ("README.md", "results.json"))
MARKER = "<!-- result -->"
BATCH_SIZES = {
    "vgg16": 32,
    "resnet50": 16,
    "alexnet": 16,
    "inception_v3": 4,
    "unet": 2,
    "lstm_lm": 32,
    "gnmt8": 8,
    "bert": 4,
}
SHAPES = (
    Shape((1, 1)),
    Shape((1, 1), recompute=True),
    Shape((1, 1), "1f1b-flush", 4),
    Shape((1, 1), "gpipe", 4),
    Shape((2, 1)),
    Shape((1, 1, 1)),
)
# Equally many in flight, with a weight version for each and with one version.
STASHING, ONE_VERSION = SHAPES[0], SHAPES[2]
LARGE = 200e6  # smaller predictions have no relative error
_MODEL = '''
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from planner.model.spec import load_model_file
from profiles.{name}.model import *


class Samples(Dataset):
    """Samples made on request, so that none stay in memory."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        batch = load_model_file({path!r}).example_batch(1)
        return tree_map(
            lambda leaf: leaf if leaf is None else leaf[0], (batch.args, batch.kwargs, batch.target)
        )


def dataset():
    return Samples()
'''


def main() -> int:
    """Measure the models named, print the tables, and with --save write them into the README."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help=f"names under profiles/ (default: {' '.join(BATCH_SIZES)})"
    )
    parser.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="only the first so many plans of each model"
    )
    parser.add_argument(
        "--returned-only", action="store_true", help="leave out the runs that keep freed memory"
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the rows into results.json, and all that it has into the README",
    )
    args = parser.parse_args()
    known: dict[str, list[dict[str, Any]]] = (
        json.loads(RESULTS.read_text()) if args.save and RESULTS.exists() else {}
    )
    for name in args.models or BATCH_SIZES:
        known[name] = []
        with tempfile.TemporaryDirectory() as folder:
            for row in _model(
                name, Path(folder), SHAPES[: args.shapes], kept=not args.returned_only
            ):
                known[name].append(row)
                print(row, file=sys.stderr, flush=True)
        if args.save:
            RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    tables = _tables([row for name in BATCH_SIZES for row in known.get(name, ())])
    print(tables)
    if args.save:
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        about = (
            f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, Linux {platform.release()}, "
            f"torch {torch.__version__}."
        )
        README.write_text(f"{head}{MARKER}\n\n{about}\n\n{tables}\n", encoding="utf-8")
    return 0


def _model(
    name: str, folder: Path, shapes: Sequence[Shape], *, kept: bool
) -> Iterator[dict[str, Any]]:
    source = ROOT / "profiles" / name / "model.py"
    model, profile_path = folder / "model.py", folder / "profile.json"
    model.write_text(_MODEL.format(name=name, path=str(source)), encoding="utf-8")
    size = str(BATCH_SIZES[name])
    command = [
        sys.executable,
        "-m",
        "planner",
        "profile",
        str(source),
        "--device",
        "cpu",
        "--batch-size",
        size,
    ]
    command += ["--seconds", "2"]
    subprocess.run([*command, "-o", str(profile_path)], check=True, cwd=ROOT, capture_output=True)
    profile = load_profile(profile_path)
    for shape in shapes:
        yield from _rows(name, profile, model, shape, kept=kept)


def _rows(
    name: str, profile: Profile, model: Path, shape: Shape, *, kept: bool
) -> Iterator[dict[str, Any]]:
    """Return a row per stage, for the replica with the largest peak."""
    plan = shaped_plan(profile, shape)
    # Twice the steady state: every unit in flight, and an update after each.
    steps = (
        3
        if shape.microbatches > 1
        else 3 * max(stage.in_flight for stage in plan.stages) * max(shape.replicas)
    )
    job = Job(model=str(model), plan=plan, steps=steps)
    with pages_returned():
        returned = launch(job).reports
    ordinary = launch(job).reports if kept else ()
    for number, stage in enumerate(plan.stages):
        yield {
            "model": name,
            "plan": str(shape),
            "stage": number,
            "in_flight": stage.in_flight,
            "weight_versions": max(r.weight_versions for r in returned if r.stage == number),
            "weight_bytes": sum(
                layer.weight_bytes for layer in profile.layers if layer.name in stage.layers
            ),
            "predicted_bytes": stage.memory.total_bytes,
            "returned_bytes": max(r.peak_memory_bytes for r in returned if r.stage == number),
            "kept_bytes": max(
                (r.peak_memory_bytes for r in ordinary if r.stage == number), default=None
            ),
        }


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    headers = (
        "model",
        "plan",
        "stage",
        "in flight",
        "predicted, MB",
        "measured, MB",
        "error",
        "pages kept, MB",
    )
    table = tabulate(
        [_cells(row) for row in rows], headers=headers, tablefmt="github", disable_numparse=True
    )
    large = [row for row in rows if row["returned_bytes"] >= LARGE]
    within = sum(abs(row["predicted_bytes"] / row["returned_bytes"] - 1) <= 0.1 for row in large)
    small = [
        abs(row["predicted_bytes"] - row["returned_bytes"])
        for row in rows
        if row["returned_bytes"] < LARGE
    ]
    said = f"{within} of {len(large)} stages of 200 MB or more are within 10%"
    said += (
        f"; the {len(small)} smaller ones are off by {max(small) / 1e6:.0f} MB at most.\n"
        if small
        else ".\n"
    )
    columns = (
        "model",
        "stage",
        "weights, MB",
        "versions",
        "predicted difference, MB",
        "measured, MB",
        "error",
    )
    stash = tabulate(list(_stash(rows)), headers=columns, tablefmt="github", disable_numparse=True)
    return f"{said}\n{table}\n\n### Weight stashing\n\n{stash}"


def _cells(row: dict[str, Any]) -> list[str]:
    predicted, measured, kept = row["predicted_bytes"], row["returned_bytes"], row["kept_bytes"]
    error = (
        f"{predicted / measured - 1:+.1%}"
        if measured >= LARGE
        else f"{(predicted - measured) / 1e6:+.0f} MB"
    )
    numbers = [
        f"{predicted / 1e6:.0f}",
        f"{measured / 1e6:.0f}",
        error,
        "" if kept is None else f"{kept / 1e6:.0f}",
    ]
    return [row["model"], row["plan"], str(row["stage"]), str(row["in_flight"]), *numbers]


def _stash(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Return the memory of first stages with a version per minibatch in flight, less the same with
    one version.
    """
    by_plan = {(row["model"], row["plan"]): row for row in rows if row["stage"] == 0}
    for (model, plan), stashing in by_plan.items():
        one = by_plan.get((model, str(ONE_VERSION)))
        if plan != str(STASHING) or one is None:
            continue
        predicted, measured = (
            stashing[each] - one[each] for each in ("predicted_bytes", "returned_bytes")
        )
        extra = stashing["weight_bytes"] * (stashing["weight_versions"] - one["weight_versions"])
        yield [
            model,
            "0",
            f"{stashing['weight_bytes'] / 1e6:.1f}",
            f"{stashing['weight_versions']} and {one['weight_versions']}",
            f"{predicted / 1e6:.1f}",
            f"{measured / 1e6:.1f}",
            f"{(predicted - measured) / extra:+.1%} of the versions",
        ]


if __name__ == "__main__":
    sys.exit(main())
