"""Measure the README's table over the models under profiles/: python -m benchmarks.models
--help.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
# Minibatches that take one CPU core seconds.
BATCH_SIZES = {
    "vgg16": 32,
    "resnet50": 16,
    "alexnet": 32,
    "inception_v3": 4,
    "unet": 2,
    "lstm_lm": 32,
    "gpt2": 4,
    "s2vt": 8,
    "gnmt8": 8,
    "gnmt16": 8,
    "awd_lm": 8,
    "bert": 4,
    "t5": 8,
    "llama": 4,
    "mixtral": 4,
}
COLUMNS = (
    *(
        "model",
        "samples",
        "layers",
        "capture",
        "3 stages",
        "7 stages",
        "evaluation",
        "profiling",
        "sum of layers",
    ),
    *("on the thread", "worst of 4 stages"),
)


def main() -> int:
    """Measure each model in its own process, and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", help=f"names under profiles/ (default: {' '.join(BATCH_SIZES)})"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="per measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="build_tiny() where there is one, else leave the model out",
    )
    parser.add_argument(
        "--save", action="store_true", help="write each profile to profiles/MODEL/cpu.json"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        from benchmarks.models.measure import measure_model

        print(
            json.dumps(
                measure_model(args.one, BATCH_SIZES[args.one], args.seconds, args.tiny, args.save)
            )
        )
        return 0
    rows = []
    for name in args.models or BATCH_SIZES:
        if args.tiny and "def build_tiny" not in (ROOT / "profiles" / name / "model.py").read_text(
            encoding="utf-8"
        ):
            continue
        rows.append(_row(name, args.seconds, tiny=args.tiny, save=args.save))
        print(f"{name}: {rows[-1][1:]}", file=sys.stderr)
    print(tabulate(rows, headers=COLUMNS, tablefmt="github", disable_numparse=True))
    return 0


def _row(name: str, seconds: float, *, tiny: bool, save: bool) -> list[str]:
    flags = [flag for flag, given in (("--tiny", tiny), ("--save", save)) if given]
    command = [
        sys.executable,
        "-m",
        "benchmarks.models",
        "--one",
        name,
        "--seconds",
        str(seconds),
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [name, str(BATCH_SIZES[name]), reason, *[""] * (len(COLUMNS) - 3)]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return [found[column] for column in COLUMNS]


if __name__ == "__main__":
    sys.exit(main())
