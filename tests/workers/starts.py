"""Start real trainings again and again beside a busy core: `python -m tests.workers.starts 200`.

A start is a training of two minibatches by two workers, each a process of its own, as `plan train`
starts them. Each captures its model while the supervisor watches. Prints each start that failed and
why, and how many did.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

from planner.errors import PlannerError
from planner.executor.worker import launch
from planner.formats.plan import Plan
from planner.workers.job import Job
from tests.executor.plans import make_plan, structural_profile

MODELS = ("lstm", "mixed", "gnmt", "gpt2", "resnet", "unet", "towers", "vgg")
STEPS = 2
_SAMPLES = 4
_ROOT = Path(__file__).parents[2]
_MODEL = """
import torch
from tests.model.architectures import ARCHITECTURES

CASE = ARCHITECTURES["NAME"]

def build_model():
    return CASE.build()

def example_batch(size):
    return CASE.batch(size)

def loss(output, target):
    return CASE.loss(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.001)
"""


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep a core busy meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def make_plans(folder: Path) -> dict[str, tuple[Path, Plan]]:
    """Write a file for each model; return it with a plan of two stages."""
    plans = {}
    for name in MODELS:
        path = folder / f"{name}.py"
        path.write_text(_MODEL.replace("NAME", name), encoding="utf-8")
        plans[name] = path, make_plan(structural_profile(path, _SAMPLES), (1, 1))
    return plans


def failures(starts: int, folder: Path) -> list[str]:
    """Start so many trainings, of one model after the other; return why some failed."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    plans = make_plans(folder)
    failed = []
    with busy_core():
        for number, name in enumerate(islice(cycle(MODELS), starts), 1):
            path, plan = plans[name]
            began_s = time.monotonic()
            try:
                result = launch(Job(model=str(path), plan=plan, steps=STEPS))
                problem = (
                    ""
                    if result.minibatches == STEPS
                    else f"trained {result.minibatches} minibatches"
                )
            except PlannerError as error:
                problem = str(error)
            if problem:
                failed.append(f"start {number}, {name}: {problem}")
            sys.stderr.write(f"{number} {name} {time.monotonic() - began_s:.0f} s {problem}\n")
    return failed


def main() -> int:
    """Run as many starts as the command line says."""
    starts = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        failed = failures(starts, Path(folder))
    sys.stdout.write("\n".join([*failed, f"{len(failed)} of {starts} starts failed", ""]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
