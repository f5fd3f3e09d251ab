"""Measure the time and memory of profiling. See README.md in this folder.

python -m benchmarks.speed.profiling --save
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.kept import ROOT

README = Path(__file__).with_name("README.md")
MARKER = "<!-- result -->"
BATCH_SIZES = {"vgg16": 32, "resnet50": 16, "unet": 2, "gpt2": 4}


@dataclass(frozen=True)
class Cost:
    """Time and memory of one process, from start to end."""

    wall_s: float
    processor_s: float
    peak_bytes: int


def main() -> int:
    """Measure each case in its own process, print the tables, and with --save write them into the
    README.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        help=f"names under profiles/ (default: {' '.join(BATCH_SIZES)}), or llama70",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of plan profile (default: %(default)s, as there)",
    )
    parser.add_argument("--save", action="store_true", help="write the tables into the README")
    args = parser.parse_args()
    names = args.models or [*BATCH_SIZES, "llama70"]
    tables = [_measured([name for name in names if name != "llama70"], args.seconds)]
    if "llama70" in names:
        tables.append(_estimated())
    text = "\n\n".join(tables)
    print(text)
    if args.save:
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        about = (
            f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, Linux {platform.release()}, "
            f"torch {torch.__version__}"
        )
        about += f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
        README.write_text(f"{head}{MARKER}\n\n{about}\n\n{text}\n", encoding="utf-8")
    return 0


def _measured(names: list[str], seconds: float) -> str:
    rows = []
    for name in names:
        model, size = f"profiles/{name}/model.py", str(BATCH_SIZES[name])
        plain = _cost("-m", "benchmarks.speed.profiling.step", model, size)
        keeping = _cost("-m", "benchmarks.speed.profiling.step", model, size, "--keep")
        found = _profile(model, "--batch-size", size, "--seconds", str(seconds))
        rows.append(
            [
                name,
                size,
                f"{found.wall_s:.0f}",
                f"{found.processor_s:.0f}",
                *(f"{each.peak_bytes / 1e6:.0f}" for each in (found, plain, keeping)),
                f"{found.peak_bytes / plain.peak_bytes:.2f}",
                f"{found.peak_bytes / keeping.peak_bytes:.2f}",
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    headers = [
        "model",
        "samples",
        "seconds",
        "of the processor",
        "peak, MB",
        "plain steps, MB",
        "keeping pages, MB",
    ]
    headers += ["of plain steps", "of steps that keep pages"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _estimated() -> str:
    if find_spec("transformers") is None:
        return "Llama 70B: needs `pip install 'transformers>=4.50'`."
    options = ("--estimate", "--device", "h200", "--batch-size", "1")
    found = _profile("benchmarks/speed/profiling/llama70.py", *options)
    return (
        f"Llama 70B, estimated for an H200: {found.wall_s:.0f} s (of the processor "
        f"{found.processor_s:.0f}), aim 120; "
        f"{found.peak_bytes / 1e9:.2f} GB, aim 2 GB."
    )


def _profile(*arguments: str) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        return _cost("-m", "planner", "profile", *arguments, "-o", f"{folder}/profile.json")


def _cost(*arguments: str) -> Cost:
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return Cost(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


if __name__ == "__main__":
    sys.exit(main())
