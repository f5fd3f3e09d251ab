"""What the layers of a model take together, for bounds that no way to run them is below."""

from dataclasses import dataclass

import numpy as np

from planner.cost.work import Floats
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import column, uncut_groups


@dataclass(frozen=True)
class GroupTotals:
    """Seconds and bytes of a microbatch, a row per group of layers that no cut may separate."""

    sizes: list[int]  # layers of each group
    forward_s: Floats
    compute_s: Floats  # forward and backward
    saved_bytes: Floats
    kept_bytes: Floats  # weights, and gradients where these exist all at once
    optimizer_bytes: Floats
    memory_bytes: float  # for tensors on each GPU; infinite without a limit
    most_replicas: int  # that a stage may have

    @classmethod
    def of(cls, problem: Problem) -> "GroupTotals":
        """Add up the layers of a problem's model."""
        layer_costs = problem.layer_costs
        groups = uncut_groups(layer_costs)
        starts = [group[0] for group in groups]

        def total(name: str) -> Floats:
            return np.asarray(np.add.reduceat(column(layer_costs, name), starts))

        forward_s = total("forward_s")
        kept_bytes = total("weight_bytes")

        # Of a single microbatch, gradients may not exist all at once.
        if problem.microbatches > 1:
            kept_bytes = kept_bytes + total("gradient_bytes")

        return cls(
            sizes=[len(group) for group in groups],
            forward_s=forward_s,
            compute_s=forward_s + total("backward_s"),
            saved_bytes=total("saved_bytes"),
            kept_bytes=kept_bytes,
            optimizer_bytes=total("optimizer_bytes"),
            memory_bytes=_room_bytes(problem),
            most_replicas=problem.most_replicas_on(problem.cluster.gpus),
        )

    @property
    def once_s(self) -> float:
        """Seconds of all layers, forward and backward."""
        return float(self.compute_s.sum())


def _room_bytes(problem: Problem) -> float:
    """Return the bytes for tensors on a GPU without communicators; infinite without a limit."""
    memory_bytes = problem.cluster.memory_bytes
    if memory_bytes is None:
        return np.inf

    overheads = problem.layer_costs.overheads
    if overheads is None:
        return float(memory_bytes)
    return float(overheads.reserve(0).room(memory_bytes))


def least_recomputation_s(
    problem: Problem,
    excess_bytes: float,
    gains_bytes: Floats,
    forward_s: Floats,
) -> float:
    """Return the least seconds of forwards that run again to save `excess_bytes`; or infinity.

    The relaxed knapsack of Dantzig (1957): those run first that take least time for what they save,
    the last of them in part.

    Args:
        problem: whose rule says whether anything recomputes.
        excess_bytes: to be saved.
        gains_bytes: what recomputing each row saves; any sign.
        forward_s: what it takes.
    """
    rule = problem.recompute
    if rule in ("always", "blocks"):
        return float(forward_s.sum())
    if excess_bytes <= 0:
        return 0.0
    if rule == "never":
        return np.inf

    useful = np.flatnonzero(gains_bytes > 0)
    order = useful[np.argsort(forward_s[useful] / gains_bytes[useful])]
    gained_bytes = running_sums(gains_bytes[order])
    if gained_bytes[-1] < excess_bytes:
        return np.inf
    return float(np.interp(excess_bytes, gained_bytes, running_sums(forward_s[order])))


def running_sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, ... n values."""
    return np.concatenate(([0.0], np.cumsum(values)))
