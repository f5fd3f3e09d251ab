"""The script for torch.distributed.pipelining is run, and its losses are those of `plan train`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner.errors import InputError, PlanError
from planner.formats.plan import Plan
from planner.options.training import TrainingOptions
from planner.schedule.registry import find
from planner.workers.job import Job
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import TIMEOUT_S, run_jobs
from tests.executor.run.test_padded_labels import MODEL
from tests.executor.run.test_padded_labels import plan_of as plan_of_padded
from tests.exports.plans import plan_of

STEPS = 4
ROOT = Path(__file__).resolve().parents[2]
SCHEDULER = """

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.2)
"""


def losses_of_script(script: Path, workers: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={workers}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += [str(script), "--steps", str(STEPS), "--seed", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, messages = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers
            output, messages = process.communicate()
            raise AssertionError(f"the workers did not end within {TIMEOUT_S} s:\n{messages}") from None
    assert process.returncode == 0, messages
    return [float(number) for number in re.findall(r"minibatch \d+ loss (\S+)", output)]


@pytest.mark.parametrize(
    ("model", "replicas", "schedule", "microbatches"),
    [
        # Values with several users, an integer and a boolean value cross cuts; dropout, BatchNorm.
        pytest.param("language", (1, 1, 1), "1f1b-flush", 4, id="language-1f1b", marks=pytest.mark.slow),
        pytest.param("convolutional", (2, 2), "gpipe", 4, id="convolutional-2-2", marks=pytest.mark.slow),
        pytest.param("blocks", (1, 1), "1f1b-flush", 2, id="blocks"),
        # Both stages hold the embedding, which is the head, and a weight of all blocks.
        pytest.param("tied", (1, 1), "1f1b-flush", 4, id="tied"),
        pytest.param("tied", (2, 2), "gpipe", 4, id="tied-2-2", marks=pytest.mark.slow),
    ],
)
def test_the_script_computes_what_an_unsplit_run_computes(
    model: str, replicas: tuple[int, ...], schedule: str, microbatches: int, tmp_path: Path
) -> None:
    path = write_model(tmp_path, model, "adamw")
    path.write_text(path.read_text(encoding="utf-8") + SCHEDULER, encoding="utf-8")
    profile = structural_profile(path, 4)
    plan = make_plan(profile, replicas, schedule, microbatches)
    unsplit = make_plan(profile, (1,), "gpipe", microbatches)
    script = tmp_path / "train_pipelining.py"
    script.write_text(planner.export(plan, "torch-pipelining", model=path), encoding="utf-8")
    (ours,) = run_jobs([Job(model=str(path), plan=unsplit, steps=STEPS, seed=3)], tmp_path)
    assert losses_of_script(script, plan.workers) == pytest.approx([loss.loss for loss in ours.losses], rel=1e-5)


@pytest.mark.slow
def test_microbatches_count_by_their_labels(tmp_path: Path) -> None:
    """Microbatches of one sample, some without any label."""
    path = tmp_path / "padded.py"
    path.write_text(MODEL, encoding="utf-8")
    plan = plan_of_padded(path, (1, 1), "1f1b-flush", 8, 1)
    script = tmp_path / "train_pipelining.py"
    script.write_text(planner.export(plan, "torch-pipelining", model=path), encoding="utf-8")
    options = TrainingOptions(drop_last=True)
    (ours,) = run_jobs([Job(model=str(path), plan=plan, steps=STEPS, seed=3, options=options)], tmp_path)
    assert losses_of_script(script, plan.workers) == pytest.approx([loss.loss for loss in ours.losses], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule"), [("language", "interleaved"), ("tied", "interleaved"), ("language", "zb-v")]
)
def test_chunks_and_recomputed_stages_equal_the_unsplit_plan(model: str, schedule: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, model, "momentum")
    profile = structural_profile(path, 4)
    chunks = make_plan(profile, (1, 1, 1, 1), "gpipe", 4)
    stages = tuple(
        stage.model_copy(update={"ranks": (find(schedule).worker_of(index, 2),), "recompute": index > 0})
        for index, stage in enumerate(chunks.stages)
    )
    fields = chunks.model_dump() | {"schedule": schedule, "stages": [s.model_dump() for s in stages]}
    script = tmp_path / "train_pipelining.py"
    script.write_text(planner.export(Plan.model_validate(fields), "torch-pipelining", model=path), encoding="utf-8")
    whole = make_plan(profile, (1, 1), "1f1b-flush", 4)
    (ours,) = run_jobs([Job(model=str(path), plan=whole, steps=STEPS, seed=3)], tmp_path)
    assert losses_of_script(script, 2) == pytest.approx([loss.loss for loss in ours.losses], rel=1e-5)


def test_what_it_cannot_express() -> None:
    with pytest.raises(PlanError, match="no form for '2-1', whose stages have different numbers of replicas"):
        planner.export(trainable(plan_of([["a"], ["b"]], (2, 1))), "torch-pipelining", model="model.py")
    with pytest.raises(PlanError, match="imported profile"):
        planner.export(
            plan_of([["a"], ["b"]]).model_copy(update={"graph_hash": None}), "torch-pipelining", model="m.py"
        )
    with pytest.raises(PlanError, match="8 do not divide by 3"):
        planner.export(trainable(plan_of([["a"], ["b"]], (3, 3))), "torch-pipelining", model="model.py")
    with pytest.raises(InputError, match="needs the model file"):
        planner.export(trainable(plan_of([["a"], ["b"]])), "torch-pipelining")


def test_stashing_becomes_a_flush_and_is_said() -> None:
    plan = trainable(plan_of([["a"], ["b"]], schedule="1f1b", microbatches=1))
    text = planner.export(plan, "torch-pipelining", model="model.py")
    assert "MICROBATCHES = 8 " in text
    assert "# The plan's schedule, 1f1b, keeps the pipeline full by stashing weights." in text
    assert "Schedule1F1B(stages[0]" in text
    compile(text, "train_pipelining.py", "exec")


def test_2bw_keeps_its_microbatches() -> None:
    text = planner.export(trainable(plan_of([["a"], ["b"]], (2, 2), "2bw", 8)), "torch-pipelining", model="model.py")
    assert "MICROBATCHES = 4 " in text
    assert "# The plan's schedule, 2bw, keeps the pipeline full" in text


def trainable(plan: Plan) -> Plan:
    return plan.model_copy(update={"graph_hash": "0123", "microbatch_size": 4})
