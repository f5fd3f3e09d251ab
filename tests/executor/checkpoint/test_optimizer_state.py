"""Optimizers' and schedulers' state by the names of the parameters, through JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedulers

from docs.examples.newest_muon import NewestMuon
from planner.catalog.transformers_model import Bfloat16AdamW, Int8AdamW
from planner.errors import InputError
from planner.executor.checkpoint.optimizer_state import (
    OptimizerState,
    from_json,
    give_state,
    rescale_rates,
    take_state,
    to_json,
)
from planner.executor.communication.sharding import Sharding
from planner.model.elementwise import kept_whole

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "capturable rate": lambda p: AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, centered=True),
    "newest muon": lambda p: NewestMuon(
        ((str(index), each) for index, each in enumerate(p)), lr=0.01
    ),
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))


def train(module: nn.Module, optimizers: list[Optimizer], steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        module(torch.randn(4, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def through_json(state: OptimizerState) -> OptimizerState:
    return OptimizerState.model_validate_json(state.model_dump_json())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_optimizers_become_one_that_goes_on_as_they_would(name: str) -> None:
    torch.manual_seed(0)
    split, whole = model(), model()
    halves = [
        OPTIMIZERS[name](list(split[0].parameters())),
        OPTIMIZERS[name](list(split[1:].parameters())),
    ]
    train(split, halves, 3)
    # The names of the whole model's parameters in each half.
    named = [nn.ModuleDict({"0": split[0]}), nn.ModuleDict({"1": split[1], "2": split[2]})]
    taken = [take_state(optimizer, module) for optimizer, module in zip(halves, named, strict=True)]
    whole.load_state_dict(split.state_dict())
    joined = OPTIMIZERS[name](list(whole.parameters()))
    tensors = {key: value.clone() for _, kept in taken for key, value in kept.items()}
    give_state(joined, whole, [through_json(state) for state, _ in taken], tensors.__getitem__)
    train(split, halves, 3)
    train(whole, [joined], 3)
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_are_found_by_their_parameters() -> None:
    def two_groups(module: nn.Module) -> SGD:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
            {"params": [p for p in module.parameters() if p.dim() > 1]},
        ]
        return SGD(groups, lr=0.1, weight_decay=0.3)

    whole = model()
    state, tensors = take_state(two_groups(whole), whole)
    part = nn.ModuleDict({"1": nn.Linear(3, 3)})
    optimizer = two_groups(part)
    optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[1]["weight_decay"] = 7.0, 8.0
    give_state(optimizer, part, [through_json(state)], tensors.__getitem__)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.3]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_parts_become_whole_and_other_parts(name: str, replicas: int) -> None:
    """Of weights whose channels come last in memory, and of others; read where memory has any of
    both orders.
    """
    torch.manual_seed(0)

    def convolutions(memory_format: torch.memory_format) -> nn.Sequential:
        made = nn.Sequential(nn.Conv2d(12, 20, 3), nn.Conv2d(20, 4, 3))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=memory_format)
        return made

    def trained(optimizer: Optimizer, stepped: list[nn.Parameter]) -> Optimizer:
        for parameter in stepped:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return optimizer

    def parts_of(module: nn.Sequential, count: int) -> list[tuple[Optimizer, Sharding]]:
        found = []
        for replica in range(count):
            optimizer = OPTIMIZERS[name](list(module.parameters()))
            sharding = Sharding(
                list(module.parameters()), (replica, count), (), torch.device("cpu")
            )
            sharding.divide(optimizer, set(kept_whole(optimizer) or ()))
            found.append((optimizer, sharding))
        return found

    def content(
        states: list[tuple[OptimizerState, dict[str, torch.Tensor]]],
    ) -> tuple[list[OptimizerState], Any]:
        tensors = {key: value.clone() for _, kept in states for key, value in kept.items()}
        return [through_json(state) for state, _ in states], tensors.__getitem__

    first = convolutions(torch.channels_last)
    parts = parts_of(first, replicas)
    for optimizer, sharding in parts:
        trained(optimizer, [shard.stepped for shard in sharding.shards.values()])
    written = content(
        [take_state(optimizer, first, 1.0, sharding) for optimizer, sharding in parts]
    )
    whole = convolutions(torch.contiguous_format)
    joined = OPTIMIZERS[name](list(whole.parameters()))
    give_state(joined, whole, *written)
    for optimizer, sharding in parts:
        for mine, one in zip(first.parameters(), whole.parameters(), strict=True):
            for key, value in (
                optimizer.state[sharding.shards[mine].stepped].items()
                if mine in sharding.shards
                else ()
            ):
                of_whole = joined.state[one][key]
                if value.dim() == 0:
                    assert torch.equal(value, of_whole)
                else:
                    assert torch.equal(value, sharding.shards[mine].cut_from(of_whole)), key
    # And on from the whole one, and from the parts, to as many parts as there were not.
    for source in ([take_state(joined, whole)], [take_state(o, first, 1.0, s) for o, s in parts]):
        again = convolutions(torch.contiguous_format)
        for optimizer, sharding in parts_of(again, 5 - replicas):
            give_state(optimizer, again, *content(source), 1.0, sharding)
            for mine, one in zip(again.parameters(), whole.parameters(), strict=True):
                if mine in sharding.shards:
                    shard = sharding.shards[mine]
                    for key, value in optimizer.state[shard.stepped].items():
                        of_whole = joined.state[one][key]
                        assert torch.equal(
                            value, of_whole if value.dim() == 0 else shard.cut_from(of_whole)
                        ), key


def test_a_missing_part_is_refused() -> None:
    whole = nn.Linear(40, 40)
    taken = []
    for replica in range(2):
        optimizer = AdamW(whole.parameters(), lr=0.1)
        sharding = Sharding(list(whole.parameters()), (replica, 2), (), torch.device("cpu"))
        sharding.divide(optimizer)
        for shard in sharding.shards.values():
            shard.stepped.grad = torch.ones_like(shard.stepped)
        optimizer.step()
        taken.append(take_state(optimizer, whole, 1.0, sharding))
    with pytest.raises(InputError, match=r"only some elements of 'weight': 0 is missing"):
        give_state(AdamW(whole.parameters(), lr=0.1), whole, [taken[1][0]], taken[1][1].__getitem__)


def test_what_does_not_fit_is_refused() -> None:
    whole = model()
    state, tensors = take_state(AdamW(whole.parameters(), lr=0.1), whole)
    with pytest.raises(
        InputError, match=r"has the state of AdamW, but the model file's optimizer is SGD"
    ):
        give_state(SGD(whole.parameters(), lr=0.1), whole, [state], tensors.__getitem__)
    few, kept = take_state(AdamW(whole[0].parameters(), lr=0.1), nn.ModuleDict({"0": whole[0]}))
    with pytest.raises(InputError, match=r"did not train '1\.weight'"):
        give_state(AdamW(whole.parameters(), lr=0.1), whole, [few], kept.__getitem__)
    rest, others = take_state(
        AdamW(whole[1:].parameters(), lr=0.2), nn.ModuleDict({"1": whole[1], "2": whole[2]})
    )
    with pytest.raises(
        InputError, match=r"'1\.weight' was trained with lr = 0\.2, '0\.weight' with 0\.1"
    ):
        give_state(
            AdamW(whole.parameters(), lr=0.1), whole, [few, rest], (kept | others).__getitem__
        )


def test_what_json_cannot_hold_is_refused_with_its_place() -> None:
    whole = model()
    optimizer = SGD(whole.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(InputError, match=r"the optimizer's 'hook' is a builtin_function_or_method"):
        take_state(optimizer, whole)


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda o: schedulers.StepLR(o, 2),
    lambda o: schedulers.MultiStepLR(o, [2, 5]),
    lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=20),
    lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step),
    lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)], [3]
    ),
    lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
]


@pytest.mark.parametrize("index", range(len(SCHEDULERS)))
def test_schedulers_go_on_where_they_were(index: int) -> None:
    def made() -> tuple[SGD, Any]:
        optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[index](optimizer)

    def rates(optimizer: SGD, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, scheduler = made()
    rates(optimizer, scheduler, 4)
    text = json.dumps(
        [to_json(each.state_dict(), "it") for each in (scheduler, optimizer)], allow_nan=False
    )
    other_optimizer, other = made()
    states = [from_json(value) for value in json.loads(text)]
    other.load_state_dict(states[0])
    other_optimizer.load_state_dict(states[1])
    assert rates(optimizer, scheduler, 8) == rates(other_optimizer, other, 8)


def test_rates_follow_the_factor_of_the_plan_that_goes_on() -> None:
    """Linear scaling: a stage of two replicas trained at twice the user's rate, one of three goes
    on at thrice.
    """
    whole = model()
    optimizer = SGD(whole.parameters(), lr=0.2, momentum=0.9)
    state, tensors = take_state(optimizer, whole, 2.0)
    other = SGD(whole.parameters(), lr=99.0)
    give_state(other, whole, [through_json(state)], tensors.__getitem__, 3.0)
    assert other.param_groups[0]["lr"] == pytest.approx(0.3)
    scheduler = schedulers.SequentialLR(
        optimizer,
        [schedulers.ConstantLR(optimizer, 1.0), schedulers.ConstantLR(optimizer, 1.0)],
        [3],
    )
    scaled = rescale_rates(scheduler.state_dict(), 1.5)
    assert scaled["_last_lr"] == scaled["_schedulers"][1]["base_lrs"] == [pytest.approx(0.3)]


def test_nothing_else_comes_out_of_json() -> None:
    for value in ({"object": "os.system"}, {"tensor": ["Tensor", [], 1]}, {"tuple": 3}, {}):
        with pytest.raises(ValueError, match="is not a value of a checkpoint"):
            from_json(value)
    assert from_json(to_json({1: (float("inf"), [None, True])}, "it")) == {
        1: (float("inf"), [None, True])
    }


@pytest.mark.parametrize(
    ("make", "dtype"), [(Bfloat16AdamW, torch.bfloat16), (Int8AdamW, torch.uint8)]
)
def test_moments_keep_their_types(
    make: Callable[[Any, float], Optimizer], dtype: torch.dtype
) -> None:
    """PyTorch's load_state_dict() gives them the type of the weights."""
    torch.manual_seed(0)
    before, after = (nn.Linear(64, 64) for _ in range(2))
    optimizer = make(before.parameters(), 0.01)
    before(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()

    state, tensors = take_state(optimizer, before)
    restored = make(after.parameters(), 0.01)
    give_state(restored, after, [through_json(state)], tensors.__getitem__)

    assert restored.state[after.weight]["exp_avg"].dtype == dtype
    for key, value in optimizer.state[before.weight].items():
        assert torch.equal(restored.state[after.weight][key], value), key


class Counting(SGD):
    """Counts its steps where no parameter has it."""

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.place = place
        if place == "state":
            self.state["count"] = torch.zeros(())  # type: ignore[index]

    def state_dict(self) -> dict[str, Any]:
        more = {"count": 1} if self.place == "beside it" else {}
        return super().state_dict() | more


@pytest.mark.parametrize("place", ["state", "beside it"])
def test_state_of_no_parameter_is_refused(place: str) -> None:
    whole = model()
    with pytest.raises(InputError, match="Counting has 'count' beside the state of its parameters"):
        take_state(Counting(whole.parameters(), place), whole)
