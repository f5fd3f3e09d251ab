"""The example for the Trainer of transformers: two stages train as Trainer does in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import planner
from planner.model.spec import import_file
from tests.executor.small_base import make_base

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "trainer_loop.py"
TIMEOUT_S = 280

transformers: Any = pytest.importorskip(
    "transformers", reason="needs transformers: pip install transformers"
)
pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers are not ours
    pytest.mark.timeout(4 * TIMEOUT_S),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example with a small base, in the folder that it runs in."""
    make_base(tmp_path)
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(*arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2])])
    process = subprocess.run(
        [*command, "trainer_loop.py", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def one_process(example: ModuleType) -> list[dict[str, float]]:
    """Train with Trainer itself, and return its log."""
    trainer = transformers.Trainer(**example.what_to_train("cpu"))
    trainer.train()
    trainer.save_model("expected")
    history: list[dict[str, float]] = trainer.state.log_history
    return history


def log_of(folder: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((folder / "trainer_state.json").read_text())[
        "log_history"
    ]
    return found


def assert_same_log(
    found: list[dict[str, float]], expected: list[dict[str, float]], *others: str
) -> None:
    """Compare all but speeds and `others`: a Trainer scales summed losses, a pipeline weighs means,
    so the last bits differ.
    """
    left_out = ("runtime", "per_second", "preparation_time", *others)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() | {"eval_model_preparation_time"} >= theirs.keys()
        for name, value in mine.items():
            if not any(part in name for part in left_out):
                assert value == pytest.approx(theirs[name], rel=2e-5), name


def test_replicas_of_the_last_stage_evaluate_as_trainer_does(folder: Path) -> None:
    # Two workers that have predictions were refused, after an epoch: data parallelism is what
    # `plan solve` answers for a model as small as the guide's.
    example = import_file(folder / "trainer_loop.py")
    profile = planner.PipelineTrainer(**example.what_to_train("cpu")).profile(
        device="cpu",
        seconds=0.5,
    )
    cluster = planner.flat_cluster(2, "1Gbps")
    plan = planner.price(profile, cluster, 1, replicas=2, schedule="1f1b-flush", microbatches=2)
    planner.save_plan(plan, "plan.json")
    expected = one_process(example)
    shutil.rmtree("checkpoints")

    run_example("plan.json")

    assert any("eval_accuracy" in row for row in expected)
    assert_same_log(log_of(Path("checkpoints")), expected)


def test_a_pipeline_trains_as_trainer_does(folder: Path) -> None:
    example = import_file(folder / "trainer_loop.py")
    args = example.what_to_train("cpu")
    profile = planner.PipelineTrainer(**args).profile(device="cpu", seconds=0.5)
    cluster = planner.flat_cluster(2, "1Gbps")
    plan = planner.price(profile, cluster, 2, replicas=1, schedule="1f1b-flush", microbatches=2)
    planner.save_plan(plan, "plan.json")
    expected = one_process(example)
    shutil.rmtree("checkpoints")

    run_example("plan.json")

    assert_same_log(log_of(Path("checkpoints")), expected)
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned").state_dict()
    plain = transformers.AutoModelForCausalLM.from_pretrained("expected").state_dict()
    torch.testing.assert_close(dict(tuned), dict(plain), rtol=1e-4, atol=1e-5)

    # It continues from the first of its checkpoints to the same end.
    first = min(Path("checkpoints").glob("checkpoint-*"), key=lambda each: len(log_of(each)))
    run_example("plan.json", str(first))
    # The mean loss at the end is that of the updates since.
    assert_same_log(log_of(Path("checkpoints")), expected, "train_loss")
    again = transformers.AutoModelForCausalLM.from_pretrained("tuned").state_dict()
    torch.testing.assert_close(dict(again), dict(tuned), rtol=0, atol=0)
