"""A model in memory reaches the workers and trains as in one process, or is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.errors import InputError
from planner.executor.handed_model import packed_model
from planner.executor.run.data import make_batches
from planner.formats.plan import Plan
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import Unit
from tests.executor.reference import plain_training

SIZE, MICROBATCHES, STEPS = 4, 2, 3


def make_spec(**more: Any) -> TrainingSpec:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    data = [((torch.randn(6),), torch.randint(0, 3, ())) for _ in range(64)]
    example = (torch.randn(1, 6),), torch.randint(0, 3, (1,))
    given: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "dataset": data,
    }
    return planner.in_memory(model, example_batch=example, **given | more)


def make_plan(spec: TrainingSpec) -> Plan:
    profile = planner.profile(spec, batch_size=SIZE, seconds=0.2, device="cpu")
    cluster = planner.flat_cluster(2, "1Gbps")
    return planner.price(
        profile, cluster, 2, replicas=1, schedule="1f1b-flush", microbatches=MICROBATCHES
    )


def test_it_trains_as_in_one_process(tmp_path: Path) -> None:
    spec = make_spec()
    model = spec.build_model()
    before = copy.deepcopy(model)
    path = tmp_path / "w.pt"
    result = planner.train(spec, make_plan(spec), steps=STEPS, seed=5, save_weights=path)

    data = make_batches(spec, SIZE, MICROBATCHES, seed=5)

    def losses_of(model: nn.Module, minibatch: int) -> list[Tensor]:
        batches = [data.batch(Unit(minibatch, number)) for number in range(MICROBATCHES)]
        return [F.cross_entropy(model(*batch.args), batch.target) for batch in batches]

    losses, weights = plain_training(copy.deepcopy(before), spec.optimizer, losses_of, STEPS)
    assert [each.loss for each in result.losses] == pytest.approx(losses, rel=1e-6)
    trained = torch.load(path, weights_only=True)
    torch.testing.assert_close(trained, dict(weights), rtol=1e-5, atol=1e-7)
    # the model of this process is not trained, until it loads the weights
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    planner.load_weights(model, path)
    torch.testing.assert_close(dict(model.state_dict()), trained, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["loss", "model"])
def test_what_is_typed_into_a_session_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own_loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    own_loss.__module__ = "__main__"
    if name == "model":
        monkeypatch.setattr(nn.Tanh, "__module__", "__main__")
    spec = make_spec(**({"loss": own_loss} if name == "loss" else {}))
    with pytest.raises(InputError, match="is defined in this session") as error:
        packed_model(spec)
    assert "%%writefile" in str(error.value)


def test_what_pickle_cannot_name_is_refused() -> None:
    spec = make_spec(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(InputError, match="cannot be handed to the workers"):
        packed_model(spec)
