"""Advise, at the beginning of an asynchronous run, against momentum that adds to the delay of late gradients."""

from __future__ import annotations

from torch.optim import Optimizer

from planner.schedule.defaults import MOMENTUM_UPDATES

_LARGE = 0.8


def late_momentum(late: int, optimizer: Optimizer) -> str | None:
    """Return advice on gradients that are `late` updates late; None for few, or for an optimizer of little momentum."""
    momentum = max(map(_momentum, optimizer.param_groups), default=0.0)
    if late < MOMENTUM_UPDATES or momentum < _LARGE:
        return None
    return (
        f"gradients of the first stage are {late} updates late, and {type(optimizer).__name__}'s momentum of "
        f"{momentum:g} makes them later: such runs have ended 10 to 25% above the loss of synchronous ones. "
        "planner.optim.NewestMuon is made for late gradients; with another optimizer, train without momentum, at a "
        "lower learning rate, or begin with a synchronous start (see 'Late gradients' in the docs)."
    )


def _momentum(group: dict[str, object]) -> float:
    """Return the share of older gradients in each update of a group: SGD's momentum, or Adam's first beta."""
    betas = group.get("betas")
    share = betas[0] if isinstance(betas, tuple) else group.get("momentum", 0.0)
    return share if isinstance(share, float) else 0.0
