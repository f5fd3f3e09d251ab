"""Compare compiled stages with the sums of their layers in the profile. See README.md in this
folder.

python -m benchmarks.compiled --save
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.models.measure import cut_by_time
from benchmarks.stages_alone import verify
from planner.formats.profile import Profile
from planner.model.spec import load_model_file
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.profiler.this_machine import keep_freed_pages

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
README, RESULTS = (Path(__file__).with_name(name) for name in ("README.md", "results.json"))
MARKER = "<!-- result -->"
BATCH_SIZES = {"vgg16": 32, "resnet50": 16, "unet": 2}
STAGES = (2, 3, 4)
HEADERS = (
    "model",
    "samples",
    "uncompiled",
    "compiled",
    "runs",
    "layers",
    *(f"{count} stages" for count in STAGES),
)


def main() -> None:
    """Measure, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help=f"names under profiles/ (default: {' '.join(BATCH_SIZES)})"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--save", action="store_true", help=f"put the rows into {RESULTS.name}, and all it has here"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_pages()
    rows: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if arguments.save and RESULTS.exists() else {}
    )
    for name in arguments.models or BATCH_SIZES:
        rows[name] = row(name, arguments.seconds)
        print(rows[name], file=sys.stderr, flush=True)
    text = report([rows[name] for name in BATCH_SIZES if name in rows])
    print(text)
    if arguments.save:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        about = (
            f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, Linux {platform.release()}, "
            f"torch {torch.__version__}."
        )
        README.write_text(f"{head}{MARKER}\n\n{about}\n\n{text}\n", encoding="utf-8")


def row(name: str, seconds: float) -> dict[str, Any]:
    """Profile one model, and measure it in 2, 3 and 4 stages."""
    file = load_model_file(PROFILES / name / "model.py")
    profile = profile_model(
        file, BATCH_SIZES[name], ProfilingOptions(device="cpu", compiled=True, seconds=seconds)
    )
    found = {
        str(count): [
            time.error
            for time in verify(file, profile, cut_by_time(profile, count), seconds=seconds)
        ]
        for count in STAGES
    }
    return {"model": name, **_sums(profile), "errors": found}


def _sums(profile: Profile) -> dict[str, float]:
    """Return seconds of forward and backward: uncompiled, compiled whole, as compiled runs, and
    summed over layers.
    """
    compiled, whole = profile.compiled, profile.whole_step
    assert compiled is not None
    assert whole is not None
    return {
        "uncompiled_s": compiled.uncompiled_forward_s + compiled.uncompiled_backward_s,
        "whole_s": whole.forward_s + whole.backward_s,
        "runs_s": compiled.runs_forward_s + compiled.runs_backward_s,
        "layers_s": sum(layer.forward_s + layer.backward_s for layer in profile.layers),
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table, a row per model, and a summary."""
    table = [
        [
            each["model"],
            str(BATCH_SIZES[each["model"]]),
            *(f"{1e3 * each[what]:.0f} ms" for what in ("uncompiled_s", "whole_s")),
            *(f"{each[what] / each['whole_s'] - 1:+.1%}" for what in ("runs_s", "layers_s")),
            *(
                ", ".join(f"{error:+.1%}" for error in each["errors"][str(count)])
                for count in STAGES
            ),
        ]
        for each in rows
    ]
    errors = [abs(error) for each in rows for found in each["errors"].values() for error in found]
    return (
        tabulate(table, headers=HEADERS, tablefmt="github", disable_numparse=True)
        + f"\n\n{len(errors)} stages: median error {median(errors):.1%}, worst {max(errors):.1%}"
    )


if __name__ == "__main__":
    main()
