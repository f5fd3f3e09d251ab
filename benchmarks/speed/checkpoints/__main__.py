"""Measure what a checkpoint costs. See README.md in this folder.

python -m benchmarks.speed.checkpoints --save
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

import planner
from benchmarks.kept import ROOT
from benchmarks.testbed.two_cores.straight import straight_plan
from planner.executor.checkpoint.stage_parts import Restorable, content_of, write_part
from planner.formats.plan import Plan

README = Path(__file__).with_name("README.md")
MARKER = "<!-- result -->"
MODELS = {"transformer": 16, "vgg_like": 32}  # samples per minibatch
CHECKPOINTS = 8


@dataclass(frozen=True)
class Row:
    """Results of one model, in seconds; lists have an entry per round."""

    model: str
    size_bytes: int
    minibatch_s: float
    checkpoint_s: list[float]
    written_s: list[float]
    processor_s: float
    disk_s: float


def main() -> int:
    """Measure all models and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minibatches", type=int, default=160, help="of each run (default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--save", action="store_true", help="write the table into the README")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [measure(name, arguments.rounds, arguments.minibatches) for name in arguments.models]
    text = (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {platform.system()} "
        f"{platform.release()}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f} "
        f"before.\n\n{table(rows)}"
    )
    if arguments.save:
        before = README.read_text(encoding="utf-8").split(MARKER)[0]
        README.write_text(f"{before}{MARKER}\n\n{text}\n", encoding="utf-8")
    print(text)
    return 0


def measure(name: str, rounds: int, minibatches: int) -> Row:
    """Run with and without checkpoints in turn."""
    model = ROOT / "benchmarks" / "testbed" / "two_cores" / f"{name}.py"
    plan = _plan(model, MODELS[name])
    plain_s: list[float] = []
    checkpoint_s: list[float] = []
    written_s: list[float] = []
    processor_s = _processor_s(model)
    size_bytes, disk_s = 0, 0.0
    for _ in range(rounds):
        plain = planner.train(model, plan, steps=minibatches)
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=Path.cwd()) as folder:
            options = planner.CheckpointOptions(
                every=minibatches // CHECKPOINTS, folder=folder, keep=1
            )
            run = planner.train(model, plan, steps=minibatches, checkpoints=options)
            (newest,) = Path(folder).glob("step-*")
            size_bytes = sum(path.stat().st_size for path in newest.iterdir())
            disk_s = _disk_s(Path(folder), size_bytes)
        plain_s.append(plain.seconds)
        checkpoint_s.append((run.seconds - plain.seconds) / CHECKPOINTS)
        written_s.append(run.checkpoint_s / CHECKPOINTS)
        print(f"{name}: {checkpoint_s[-1]:.3f} s per checkpoint", file=sys.stderr, flush=True)
    return Row(
        name,
        size_bytes,
        statistics.median(plain_s) / minibatches,
        checkpoint_s,
        written_s,
        processor_s,
        disk_s,
    )


def _plan(model: Path, batch_size: int) -> Plan:
    profile = planner.profile(model, batch_size=batch_size, device="cpu", seconds=5)
    return straight_plan(
        profile, planner.flat_cluster(gpus=2, bandwidth_bytes_per_s=1.25e9), "1f1b", 1
    )


def _processor_s(model: Path) -> float:
    """Return the processor time of writing the whole model as one part, which excludes the disk's
    own work.
    """
    spec = planner.load_model_file(model)
    module = spec.build_model()
    optimizer = spec.optimizer(list(module.parameters()))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=Path.cwd()) as folder:
        began_s = time.process_time()
        own = Restorable(0, 0, module, optimizer)
        content = content_of(own)
        assert content is not None
        write_part(Path(folder), own, content)
        return time.process_time() - began_s


def _disk_s(folder: Path, size_bytes: int) -> float:
    content = os.urandom(size_bytes)
    began_s = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began_s


def table(rows: Sequence[Row]) -> str:
    """Return the table, a row per model."""
    headers = [
        "model",
        "checkpoint, MB",
        "minibatch, ms",
        "per checkpoint, ms",
        "of it written, ms",
        "processor, ms",
        "disk, ms",
        "every 10 minutes",
    ]
    lines = [
        [
            row.model,
            f"{row.size_bytes / 1e6:.1f}",
            f"{1e3 * row.minibatch_s:.1f}",
            _range(row.checkpoint_s),
            _range(row.written_s),
            f"{1e3 * row.processor_s:.0f}",
            f"{1e3 * row.disk_s:.0f}",
            f"{statistics.median(row.checkpoint_s) / 600:.3%}",
        ]
        for row in rows
    ]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def _range(seconds: Sequence[float]) -> str:
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{1e3 * median:.0f} ({1e3 * least:.0f} to {1e3 * most:.0f})"


if __name__ == "__main__":
    sys.exit(main())
