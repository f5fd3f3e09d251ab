"""A host that takes long to build its model: the others wait for it, longer than for any
message.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.formats.plan import save_plan
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 240
# Messages have two seconds, and worker 1 builds its model for six.
SLOW = """
import os, time
from datetime import timedelta

if "RANK" in os.environ:
    from planner.executor.run import agreement, context

    for module in (agreement, context):
        module.message_timeout = lambda _: timedelta(seconds=2)

    build_at_once = build_model

    def build_model():
        end = time.monotonic() + 6 * int(os.environ["RANK"])
        while time.monotonic() < end:
            pass
        return build_at_once()
"""
LOOP = """
import torch
import planner

torch.set_num_threads(1)
torch.manual_seed(0)  # example batches draw, and all ranks hand in the same
spec = planner.load_model_file("convolutional_sgd.py")
with planner.pipeline(planner.load_plan("plan.json"), spec) as pipeline:
    for _ in range(3):
        batch = spec.example_batch(4)
        pipeline.step((batch.args, batch.kwargs, batch.target))
    pipeline.drain()
    print(pipeline.minibatches)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slow model file, a plan "1-1" for it, and a loop of one's own."""
    folder = tmp_path_factory.mktemp("slow")
    path = write_model(folder, "convolutional", "sgd", more=SLOW)
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), folder / "plan.json")
    (folder / "loop.py").write_text(LOOP, encoding="utf-8")
    return folder


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("--baseline", "data-parallel"), marks=pytest.mark.slow)],
    ids=["plan", "baseline"],
)
def test_the_others_wait_for_a_model_that_is_built_slowly(
    folder: Path, more: tuple[str, ...]
) -> None:
    told = run(
        folder, "-m", "planner", "train", "convolutional_sgd.py", "--steps", "4", "--json", *more
    )
    assert json.loads(told)["minibatches"] == 4


@pytest.mark.slow
def test_so_they_do_in_a_loop_of_ones_own(folder: Path) -> None:
    told = run(
        folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py"
    )
    assert told.count("3") == 2
