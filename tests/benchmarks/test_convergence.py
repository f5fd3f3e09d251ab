"""The parts of the benchmark of convergence that need no training."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from benchmarks.convergence import characters, digits, late, replicas, transformer
from benchmarks.convergence.__main__ import make_plan
from benchmarks.convergence.emulation import lateness, train
from benchmarks.convergence.recipes import VARIABLE, Recipe


def test_held_out_text_is_not_trained_on() -> None:
    trained, held_out = characters.dataset(), characters.evaluation_dataset()
    assert len(trained) > 15 * len(held_out) > 1000  # type: ignore[arg-type]
    inputs, target = held_out[0]
    assert torch.equal(inputs[1:], target[:-1])
    assert int(inputs.max()) < characters.CHARACTERS
    assert digits.MINIBATCHES % digits.EVERY == 0


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "interleaved"])
def test_plans_have_four_stages(schedule: str) -> None:
    plan = make_plan(digits, schedule)
    assert len(plan.stages) == 4
    assert plan.workers == (2 if schedule == "interleaved" else 4)


@pytest.mark.parametrize("name", list(late.MODELS))
def test_every_stage_has_parameters(name: str) -> None:
    model = late.MODELS[name].build_model()
    stages = {late.MODELS[name].stage_of(each, 4) for each, _ in model.named_parameters()}
    assert stages == {0, 1, 2, 3}
    assert lateness("1f1b", 4) == [3, 2, 1, 0]


def test_one_replica_trains_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe("adamw", 0.004, 12)
    monkeypatch.setenv(VARIABLE, "")  # restored afterwards
    recipe.choose()
    losses: list[float] = []
    train(transformer, 10, 0, lambda _, __, loss: losses.append(loss))
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    asked = replicas.Replicas(f"{transformer.__file__}:build_model", recipe, 10, 0)
    assert replicas.train(asdict(asked))["losses"] == pytest.approx(losses, rel=1e-6)


def test_local_updates_move_the_shared_weights_as_the_paper_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    outer = replicas.Outer(model)
    velocity, expected = 0.0, 1.0
    for went in (0.5, 0.25):
        model.weight.data -= went
        outer.step()
        # Nesterov's momentum as PyTorch has it: v <- 0.9 v + g, w <- w - 0.7 (g + 0.9 v).
        velocity = 0.9 * velocity + went
        expected -= 0.7 * (went + 0.9 * velocity)
        assert model.weight.item() == pytest.approx(expected)
