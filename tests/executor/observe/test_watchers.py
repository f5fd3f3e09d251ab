"""The user's hook and TensorBoard follow a run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.executor.observe.measure import Progress
from planner.executor.observe.watchers import all_of, check_tensorboard, tensorboard
from planner.options.training import TrainingOptions
from planner.workers.job import Evaluation
from tests.executor import eager
from tests.executor.models import EVALUATION, write_model
from tests.executor.plans import make_plan, structural_profile

HOOK = """
def on_update(minibatch, loss, metrics):
    import json
    with open(FILE, "a") as file:
        file.write(json.dumps([minibatch, loss, metrics]) + "\\n")
"""


def test_the_hook_is_told_of_updates_and_evaluations(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    more = EVALUATION + HOOK.replace("FILE", repr(str(told)))
    path = write_model(tmp_path, "language", "sgd", samples=12, more=more)
    plan = make_plan(structural_profile(path, 4), (1, 1))
    result, _ = eager.run_one(path, plan, TrainingOptions(evaluate_every=2), steps=3)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(line[0], bool(line[2])) for line in lines] == [(1, False), (2, False), (2, True), (3, False), (3, True)]
    assert [line[1] for line in lines if not line[2]] == [entry.loss for entry in result.losses]
    assert lines[-1][2] == {"loss": result.evaluations[-1].loss, **result.evaluations[-1].metrics}


def test_no_callback_is_none() -> None:
    assert all_of(None, None) is None


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_without_tensorboard_the_flag_says_so() -> None:
    with pytest.raises(InputError, match="needs the package tensorboard, which is not installed"):
        check_tensorboard()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_losses_and_evaluations(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write = tensorboard(str(tmp_path))
    for minibatch in range(1, 21):
        write(Progress(minibatch, 20, 1 / minibatch, 100.0, 1.0))
    write(Progress(20, 20, 0.05, None, None, Evaluation(minibatch=20, samples=8, loss=0.5, metrics={"accuracy": 0.75})))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"training/loss", "training/samples_per_s", "evaluation/loss", "evaluation/accuracy"} == set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("training/loss")] == [1, 11, 20]
    assert events.Scalars("evaluation/accuracy")[0].value == 0.75
