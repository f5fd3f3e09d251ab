"""The optimizers that the benchmark compares, each with its settings for synchronous and for late
gradients.

`CONVERGENCE_RECIPE` in the environment chooses one, as JSON: {"optimizer": "newest-muon", "rate":
0.016, "minibatches": 1200}. Model files take `optimizer` and `scheduler` from here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from docs.examples.newest_muon import NewestMuon, orthogonal

VARIABLE = "CONVERGENCE_RECIPE"
WEIGHT_DECAY = 0.01
Named = Iterable[tuple[str, nn.Parameter]]


def _adamw(named: Named, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_by_decay(named), lr=rate, betas=(0.9, 0.98))


def _adamw_without_momentum(named: Named, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_by_decay(named), lr=rate, betas=(0.0, 0.98))


def _nadam(named: Named, rate: float) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        _by_decay(named), lr=rate, betas=(0.95, 0.98), decoupled_weight_decay=True
    )


def _nadam_099(named: Named, rate: float) -> torch.optim.Optimizer:
    """Nesterov's momentum for late gradients, as in arXiv 2505.01099."""
    return torch.optim.NAdam(
        _by_decay(named), lr=rate, betas=(0.99, 0.98), decoupled_weight_decay=True
    )


class WholeMuon(NewestMuon):
    """With matrices of queries, keys and values in one piece, and updates sized by the longer side,
    as other Muons.
    """

    @staticmethod
    def updates(mixed: Tensor) -> Tensor:
        """Return what is added to matrices or kernels, times the negative learning rate."""
        flat = mixed.flatten(2)
        size: float = 0.4 * max(flat.shape[1:]) ** 0.5
        return (orthogonal(flat) * size).reshape(mixed.shape)


def _muon(named: Named, rate: float) -> torch.optim.Optimizer:
    """Muon with Nesterov's momentum of 0.95: the newest gradient weighs 0.05 against the
    average.
    """
    return WholeMuon(
        named,
        rate,
        vectors=1.0,
        betas=(0.9, 0.98),
        average=0.95,
        newest=0.05,
        weight_decay=WEIGHT_DECAY,
    )


def _whole_newest_muon(named: Named, rate: float, vectors: float = 0.06) -> torch.optim.Optimizer:
    return WholeMuon(named, rate, vectors=vectors, weight_decay=WEIGHT_DECAY)


def _newest_muon(named: Named, rate: float) -> torch.optim.Optimizer:
    return NewestMuon(named, rate, weight_decay=WEIGHT_DECAY)


OPTIMIZERS: dict[str, Callable[[Named, float], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw, beta1 0": _adamw_without_momentum,
    "nadam 0.95": _nadam,
    "nadam 0.99": _nadam_099,
    "muon 0.95": _muon,
    # The first one is of 22 November 2026, the second is what `NewestMuon` does since.
    "newest-muon": _whole_newest_muon,
    "newest-muon, by rows": _newest_muon,
    "newest-muon, vectors 0.25": partial(_whole_newest_muon, vectors=0.25),
    "newest-muon, vectors 1": partial(_whole_newest_muon, vectors=1.0),
}


@dataclass(frozen=True)
class Recipe:
    """An optimizer by its name in `OPTIMIZERS`, its learning rate and the length of the
    training.
    """

    optimizer: str = "newest-muon"
    rate: float = 2e-3
    minibatches: int = 400

    def choose(self) -> None:
        """Make it the one that model files take, in this process and in those that it starts."""
        os.environ[VARIABLE] = json.dumps(asdict(self))


def with_remedies(name: str, synchronous_start: float, late_lr: float, clip: float | None) -> str:
    """Return the name of a training with what it does about late gradients."""
    parts = [name]
    parts += [f"first {synchronous_start:.0%} synchronous"] if synchronous_start else []
    parts += [f"late-lr {late_lr:g}"] if late_lr else []
    parts += [f"clip {clip:g}"] if clip is not None else []
    return ", ".join(parts)


def optimizer(named_parameters: Named) -> torch.optim.Optimizer:
    """Return the chosen recipe's optimizer."""
    recipe = _chosen()
    return OPTIMIZERS[recipe.optimizer](list(named_parameters), recipe.rate)


def scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a schedule that warms up over a tenth of the training, then decays linearly to 0."""
    minibatches = _chosen().minibatches

    def factor(minibatch: int) -> float:
        return min(minibatch / (0.1 * minibatches), (minibatches - minibatch) / (0.9 * minibatches))

    return LambdaLR(optimizer, factor)


def _chosen() -> Recipe:
    return Recipe(**json.loads(os.environ.get(VARIABLE, "{}")))


def _by_decay(named: Named) -> list[dict[str, object]]:
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for _, parameter in named:
        both[parameter.ndim > 1].append(parameter)
    return [
        {"params": both[0], "weight_decay": 0.0},
        {"params": both[1], "weight_decay": WEIGHT_DECAY},
    ]
