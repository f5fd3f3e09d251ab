"""How a stage's optimizer is divided over its replicas: what each has, and that they never wait for
each other.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Adagrad, AdamW, Optimizer

from docs.examples.newest_muon import NewestMuon
from planner.errors import ModelFileError, PlanError
from planner.executor.communication.sharding import ALIGNMENT, Sharding, divide
from planner.executor.stage.optimizer import StageOptimizer
from planner.model.elementwise import ELEMENTWISE, kept_whole
from planner.model.spec import TrainingSpec, in_memory
from planner.schedule.instructions import Instruction, Update
from tests.executor.device.cases import runs
from tests.schedule.check import _Run

CPU = torch.device("cpu")


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_every_element_has_one_owner_and_rows_are_equal(replicas: int) -> None:
    rng = random.Random(replicas)
    for _ in range(50):
        sizes = [rng.choice([0, 1, 7, 64, 100, 1000, 5000]) for _ in range(rng.randint(1, 9))]
        pieces, row = divide(sizes, replicas)
        for index, size in enumerate(sizes):
            own = [piece for piece in pieces if piece.parameter == index]
            assert [number for piece in own for number in range(piece.start, piece.stop)] == list(
                range(size)
            )
            assert all(piece.start % ALIGNMENT == 0 for piece in own)
        for owner in range(replicas):
            taken = [
                n for p in pieces if p.owner == owner for n in range(p.in_row.start, p.in_row.stop)
            ]
            assert len(taken) == len(set(taken))
            assert max(taken, default=-1) < row
        assert row * replicas <= sum(sizes) + ALIGNMENT * (len(sizes) + replicas)


def spec_of(optimizer: Any) -> TrainingSpec:
    return in_memory(
        nn.Linear(1, 1), example_batch=((torch.zeros(1, 1),), None), optimizer=optimizer
    )


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("kind", [AdamW, Adagrad])
def test_a_replica_holds_its_part_of_the_state(kind: Any, replicas: int) -> None:
    """Bytes of tensors, after a step, whether state is there before it (Adagrad) or not; also of
    shared weights.
    """
    module = nn.Sequential(
        nn.Linear(100, 70),
        nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    )
    whole = kind(list(module.parameters()))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    whole.step()
    all_bytes = sum(tensor.nbytes for tensor in tensors_of(whole))
    held = []
    for replica in range(replicas):
        shared = [next(module.parameters())]
        sharding = Sharding(list(module.parameters()), (replica, replicas), shared, CPU)
        stage = StageOptimizer(spec_of(kind), module, sharding=sharding)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        sharding.take_gradients()
        assert stage.optimizer is not None
        stage.optimizer.step()
        tensors = tensors_of(stage.optimizer)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        held.append(sum(tensor.nbytes for tensor in tensors))
    assert sum(held) == all_bytes
    assert max(held) <= all_bytes / replicas + len(list(module.parameters())) * 2 * ALIGNMENT * 4


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("shapes", [[(37, 53), (53,), (), (16, 8, 3, 3)], [(2, 2), (2,)]])
def test_slices_step_as_they_would_inside_their_parameters(
    kind: Any, shapes: list[tuple[int, ...]]
) -> None:
    """To the bit, with one thread; replicas that own nothing step nothing."""
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    whole[0].data = whole[0].data.t().contiguous().t()  # another order in memory
    replicas = []
    for replica in range(3):
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
        optimizer, sharding = kind(copies, lr=0.01), Sharding(copies, (replica, 3), (), CPU)
        sharding.divide(optimizer)
        replicas.append((optimizer, sharding, copies))
    reference = kind(whole, lr=0.01)
    for step in range(4):
        gradients = [
            torch.randn_like(parameter) if step != 1 or parameter.dim() else None
            for parameter in whole
        ]
        for parameter, gradient in zip(whole, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
        for optimizer, sharding, copies in replicas:
            for parameter, gradient in zip(copies, gradients, strict=True):
                parameter.grad = gradient
            sharding.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
    for _, sharding, copies in replicas:
        for parameter, copy in zip(whole, copies, strict=True):
            if copy in sharding.shards:
                shard = sharding.shards[copy]
                assert torch.equal(shard.cut_from(parameter.data), shard.stepped.data)


@pytest.mark.parametrize("replicas", [2, 3])
def test_matrices_that_an_optimizer_must_see_whole_have_one_owner(replicas: int) -> None:
    """NewestMuon's updates are those of the undivided optimizer; all else is divided by
    elements.
    """
    torch.manual_seed(0)
    modules = [
        nn.Sequential(*(nn.Linear(48, 48) for _ in range(5)), nn.Linear(48, 300))
        for _ in range(replicas + 1)
    ]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    reference, *copies = [
        NewestMuon(module.named_parameters(), to_adamw=_is_last) for module in modules
    ]
    shardings = [
        Sharding(list(modules[1 + own].parameters()), (own, replicas), (), CPU)
        for own in range(replicas)
    ]
    for optimizer, sharding in zip(copies, shardings, strict=True):
        whole = kept_whole(optimizer)
        assert whole is not None
        assert len(whole) == 5
        sharding.divide(optimizer, set(whole))
        assert all(
            shard.stepped.shape == (48, 48)
            for matrix in whole
            if (shard := sharding.shards.get(matrix))
        )
    for _ in range(3):
        gradients = [torch.randn_like(parameter) for parameter in modules[0].parameters()]
        for optimizer, module in zip((reference, *copies), modules, strict=True):
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            for sharding in shardings:
                sharding.take_gradients()
            optimizer.step()
    steps = [0] * len(gradients)
    for sharding, module in zip(shardings, modules[1:], strict=True):
        for index, (one, other) in enumerate(
            zip(modules[0].parameters(), module.parameters(), strict=True)
        ):
            if shard := sharding.shards.get(other):
                torch.testing.assert_close(
                    shard.stepped.data, shard.cut_from(one.data), rtol=1e-5, atol=1e-6
                )
                steps[index] += shard.stop - shard.start
    assert steps == [parameter.numel() for parameter in modules[0].parameters()]
    owned = [
        sum(shard.stop - shard.start for shard in sharding.shards.values())
        for sharding in shardings
    ]
    assert max(owned) <= 1.3 * sum(owned) / replicas


def _is_last(name: str, _: nn.Parameter) -> bool:
    return name.startswith("5.")


def test_a_parameter_with_gaps_in_memory_gets_memory_of_its_own() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    parameter = nn.Parameter(wide[:, ::2])
    Sharding([parameter], (0, 2), (), CPU)
    assert parameter.tolist() == [[0, 2], [4, 6], [8, 10]]
    assert parameter.is_contiguous()


def test_optimizers_that_look_at_whole_parameters_are_refused() -> None:
    module = nn.Linear(100, 70)
    sharding = Sharding(list(module.parameters()), (0, 2), (), CPU)
    with pytest.raises(
        PlanError, match=r"nobody says that Adafactor treats each element of a parameter alone"
    ) as e:
        StageOptimizer(spec_of(Adafactor), module, sharding=sharding)
    assert "`shard_optimizer=never`" in str(e.value.hint)


def test_state_that_cannot_be_divided_is_refused() -> None:
    class Factored(AdamW):
        elementwise = True

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["rows"] = torch.zeros(parameter.shape[0] + 1)

    module = nn.Linear(100, 70)
    sharding = Sharding(list(module.parameters()), (0, 2), (), CPU)
    with pytest.raises(
        ModelFileError, match=r"of shape \(70, 100\) a tensor 'rows' of shape \(71,\)"
    ):
        StageOptimizer(spec_of(Factored), module, sharding=sharding)


def test_updates_at_which_replicas_wait_for_each_other_close_no_circle() -> None:
    """Over gloo the host waits for the weights: an update is a meeting, as an all-reduce is."""
    arrived: dict[tuple[int, int], set[int]] = {}
    execute = _Run._execute

    def meeting(run: _Run, rank: int, instruction: Instruction) -> bool:
        if isinstance(instruction, Update):
            here = arrived.setdefault((instruction.stage, instruction.round), set())
            if rank in here:
                return here == set(run.shape.ranks[instruction.stage])
            execute(run, rank, instruction)
            here.add(rank)
            return here == set(run.shape.ranks[instruction.stage])
        return execute(run, rank, instruction)

    shapes = {str(run): run.shape for run in runs() if max(run.replicas) > 1}
    with patch.object(_Run, "_execute", meeting):
        for shape in shapes.values():
            for minibatches in (1, 5, 12):
                arrived.clear()
                _Run(shape, minibatches).complete()
    assert len(shapes) > 60
