"""Train replicas of the whole model in a plain loop: what `links.py` compares pipelines with on
slow links.

- DistributedDataParallel (Li et al. 2020), whose gradients PowerSGD may compress (Vogels et al.
  2019; PyTorch's hook, with error feedback, from the third minibatch on).
- Local updates, as DiLoCo has them (Douillard et al. 2023, algorithm 1): each replica trains by
  itself for some minibatches. The mean of how far they went is then a gradient for SGD with
  Nesterov's momentum, whose weights all replicas go on with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence import transformer
from benchmarks.convergence.emulation import evaluate
from benchmarks.convergence.recipes import Recipe
from planner.executor.run.data import make_batches
from planner.model.spec import load_model_file
from planner.schedule.instructions import Unit

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # the paper's
START_UP = 8  # minibatches whose time does not count


@dataclass(frozen=True)
class Replicas:
    """What is trained, and how the replicas agree.

    Attributes:
        model: the model file, with the function that makes the model.
        recipe: of the whole training.
        minibatches: trained of it.
        seed: of first weights and data.
        power_sgd: rank to which gradients are compressed; 0: they are not.
        local: minibatches between two agreements, for local updates; 0 for DistributedDataParallel.
    """

    model: str
    recipe: Recipe
    minibatches: int
    seed: int
    power_sgd: int = 0
    local: int = 0


class Outer:
    """The weights that all replicas of a local training share, and their optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._local = list(model.parameters())
        self._shared = nn.Parameter(self._flat())
        self._optimizer = torch.optim.SGD([self._shared], OUTER_RATE, OUTER_MOMENTUM, nesterov=True)

    def step(self) -> None:
        """Update the shared weights by what the replicas changed, and go on with them."""
        gone = self._shared.detach() - self._flat()
        dist.all_reduce(gone)
        self._shared.grad = gone / dist.get_world_size()
        self._optimizer.step()
        for parameter, part in zip(self._local, self._parts(), strict=True):
            parameter.data.copy_(part)

    def _parts(self) -> Iterator[Tensor]:
        first = 0
        for parameter in self._local:
            yield self._shared.detach()[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()

    def _flat(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self._local])


def train(replicas: dict[str, Any]) -> dict[str, Any]:
    """Train one of the `Replicas`, in a process that the environment gives its place; return losses
    and times.

    The minibatches are those of the pipelines, divided over the replicas. `loss` is on held-out
    data, with the weights that all agree on at the end; `losses` are means over the replicas.
    """
    asked = Replicas(**replicas | {"recipe": Recipe(**replicas["recipe"])})
    asked.recipe.choose()
    dist.init_process_group("gloo")
    try:
        return _train(asked, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    finally:
        dist.destroy_process_group()


def _train(replicas: Replicas, rank: int, world: int) -> dict[str, Any]:
    file = load_model_file(replicas.model)
    torch.manual_seed(replicas.seed)
    model = file.build_model()
    optimizer = file.optimizer(dict(model.named_parameters()))
    scheduler = file.scheduler(optimizer)
    assert scheduler is not None
    batches = make_batches(
        file, transformer.MINIBATCH // world, world, replicas.seed, drop_last=True
    )
    outer = Outer(model) if replicas.local else None
    forward = model if replicas.local else _parallel(model, replicas.power_sgd)
    losses, ends = [], []
    for minibatch in range(replicas.minibatches):
        batch = batches.batch(Unit(minibatch, rank))
        optimizer.zero_grad()
        loss = transformer.loss(forward(*batch.args), batch.target)
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
        if outer is not None and (minibatch + 1) % replicas.local == 0:
            outer.step()
        losses.append(float(loss.detach()))
        ends.append(time.perf_counter())
    mean_losses = torch.tensor(losses)
    dist.all_reduce(mean_losses)
    # A whole number of agreements, the first one left out.
    first = replicas.local or START_UP
    return {
        "loss": evaluate(transformer, model, transformer.evaluation_dataset())[0]
        if rank == 0
        else None,
        "losses": (mean_losses / world).tolist(),
        "seconds": ends[-1] - ends[0],
        "seconds_per_minibatch": (ends[-1] - ends[first - 1]) / (len(ends) - first),
    }


def _parallel(model: nn.Module, power_sgd: int) -> nn.Module:
    parallel = DistributedDataParallel(model)
    if power_sgd:
        parallel.register_comm_hook(
            PowerSGDState(None, power_sgd, start_powerSGD_iter=2), powerSGD_hook
        )
    return parallel
