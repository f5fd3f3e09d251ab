"""Ask `plan fit` for models of transformers on three clusters. See README.md in this folder."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from benchmarks.kept import printed
from planner.analysis.fit import Fit
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, short_config
from planner.units import format_seconds

MODELS = ("gpt2-xl", "LlamaForCausalLM", "GPTNeoXForCausalLM")
LIMIT_S = 600


class Cluster(NamedTuple):
    """GPUs to ask for."""

    gpus: int
    gpu: str


CLUSTERS = (Cluster(8, "rtx-4090"), Cluster(8, "a100-80gb"), Cluster(64, "a100-80gb"))


def main(argv: Sequence[str] | None = None) -> int:
    """Ask for each model on each cluster, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="(default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write what is printed to results.md beside this")
    args = parser.parse_args(argv)
    rows = [list(_row(model, cluster)) for model in args.models for cluster in CLUSTERS]
    headers = [
        "model",
        "GPUs",
        "plan",
        "minibatch",
        "fastest FSDP or ZeRO",
        "plan is faster by",
        "fastest equal stages",
        "plan is faster by",
        "data parallel",
        "fewest GPUs",
        "seconds",
        "CPU seconds",
    ]
    with printed(Path(__file__).parent, save=args.save):
        print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return 0


def _row(model: str, cluster: Cluster) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        asked = [model, "--gpus", str(cluster.gpus), "--gpu", cluster.gpu, "--json"]
        began, used = time.perf_counter(), _children_s()
        command = [sys.executable, "-m", "planner", "fit", *asked]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        seconds, cpu_s = time.perf_counter() - began, _children_s() - used
    print(f"{model} {cluster}: {seconds:.1f} s, exit {done.returncode}", file=sys.stderr)
    yield model
    yield f"{cluster.gpus} {cluster.gpu}"
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr)
    answer = Fit.model_validate_json(done.stdout)
    yield from ("does not fit", *[""] * 6) if answer.asked.plan is None else _speeds(answer.asked.plan)
    fitting = [row.gpus for row in (answer.asked, *answer.others) if row.plan is not None]
    yield str(min(fitting)) if fitting else ""
    yield f"{seconds:.0f}"
    yield f"{cpu_s:.0f}"


def _speeds(plan: Plan) -> Iterator[str]:
    """Yield the plan and its time, the fastest of two kinds of baselines with the plan's gain, and data parallelism."""
    predicted = plan.predicted.seconds_per_minibatch
    yield f"{short_config(plan.config)}, {plan.schedule}"
    yield format_seconds(predicted)
    for kind in ("ZeRO", "equal stages"):
        fitting = [way for way in plan.baselines if kind in way.name and not way.over_memory_bytes]
        best = min(fitting, key=_seconds, default=None)
        yield "none fits" if best is None else f"{best.name}: {format_seconds(_seconds(best))}"
        yield "" if best is None else f"{_seconds(best) / predicted - 1:+.1%}"
    whole = [way for way in plan.baselines if way.name.startswith("data parallel") and not way.over_memory_bytes]
    yield format_seconds(min(map(_seconds, whole))) if whole else "does not fit"


def _seconds(way: OtherWay) -> float:
    """Return the seconds per minibatch."""
    return way.seconds_per_microbatch * way.microbatches


def _children_s() -> float:
    """Return the processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
