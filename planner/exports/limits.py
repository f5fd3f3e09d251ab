"""What no other system can express of a plan: errors for what it must have, remarks for what it does differently."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

from planner.errors import PlanError
from planner.formats.plan import Plan

LEAST_PER_STAGE = 4  # microbatches per stage if the plan has one per minibatch, for a bubble of a fifth


@dataclass(frozen=True)
class Degrees:
    """How the workers of a plan are divided: other systems copy whole pipelines, whose layers equal groups divide."""

    replicas: int  # of every stage
    pipeline: int  # workers, or groups of them, that a pipeline has
    tensor: int  # ranks of a group


def equal_degrees(plan: Plan, system: str) -> Degrees:
    """Return how many replicas all stages have, of how many ranks.

    Raises:
        PlanError: if stages have different numbers, or if ranks do not go stage by stage.
    """
    replicas, tensor = set(plan.replicas), set(plan.degrees)
    if len(replicas) > 1 or len(tensor) > 1:
        raise PlanError(
            f"{system} copies whole pipelines, so it has no form for '{plan.config}', whose stages have different "
            f"numbers of {'replicas' if len(replicas) > 1 else 'ranks'}",
            hint="`plan train` runs it; `plan compare` prices straight pipelines"
            if len(replicas) > 1
            else "solve with one degree in `tensor`",
        )
    found = Degrees(replicas.pop(), plan.workers // len(plan.stages[0].ranks), tensor.pop())
    ranks = [rank for stage in plan.stages[: found.pipeline] for rank in stage.ranks]
    if ranks != list(range(len(ranks))):
        raise PlanError(
            f"{system} numbers workers stage by stage, but the plan's ranks are {ranks}",
            hint="solve for a cluster of one level, or list its kinds of GPUs in the order of the stages",
        )
    return found


def microbatches_per_pipeline(plan: Plan, replicas: int, system: str) -> int:
    """Return the microbatches that each copy of the pipeline runs between two updates.

    Raises:
        PlanError: if the plan's microbatches cannot be divided among the copies.
    """
    if plan.schedule.stashes:
        return LEAST_PER_STAGE * len(plan.stages) if len(plan.stages) > 1 else 1
    if plan.microbatches % replicas:
        raise PlanError(
            f"{system} gives each of the {replicas} pipelines the same number of microbatches, but {plan.microbatches} "
            f"do not divide by {replicas}",
            hint=f"solve with `microbatches={plan.microbatches // replicas * replicas + replicas}`",
        )
    return plan.microbatches // replicas


def never_drains(plan: Plan) -> bool:
    """Return whether the plan keeps several weight versions, which none of these systems does."""
    return plan.schedule.asynchronous


def shared_weights(plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """Group the weights that several stages train by these stages."""
    holders: dict[str, set[int]] = {}
    for shared in plan.shared:
        for name in shared.weights:
            holders.setdefault(name, set()).update(shared.stages)
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stages in sorted(holders.items()):
        found.setdefault(tuple(sorted(stages)), []).append(name)
    return found


def remarks(plan: Plan, system: str) -> list[str]:
    """Say how the system's schedule differs from the plan's, and what the user who builds the layers must know."""
    return [*schedule_remarks(plan, system), *_model_remarks(plan, system)]


def schedule_remarks(plan: Plan, system: str) -> list[str]:
    """Say how the system's schedule and messages differ from the plan's."""
    said = []
    if never_drains(plan):
        said.append(
            f"The plan's schedule, {plan.schedule}, keeps the pipeline full by stashing weights. {system} has no such "
            "schedule: it drains the pipeline before every update, so expect fewer samples/s than the plan predicts."
        )
        if plan.schedule.stashes and len(plan.stages) > 1:
            said.append(
                f"Gradients are accumulated over {LEAST_PER_STAGE} microbatches per stage. The plan updates after each "
                "one: adapt the learning rate."
            )
    if plan.cluster.compress != "none":
        said.append(
            f"The plan sends activations as {plan.cluster.compress}. {system} sends them as they are, so links are "
            "busier than the plan predicts."
        )
    return said


def shards_everywhere(plan: Plan, system: str, said: list[str]) -> bool:
    """Return whether the system must divide the optimizer's state, and say so where it is more than the plan does."""
    sharded = [stage.sharded for stage in plan.stages]
    if any(sharded) and not all(sharded):
        said.append(f"The plan divides the optimizer's state in some stages; {system} does so in all of them.")
    return any(sharded)


def _model_remarks(plan: Plan, system: str) -> list[str]:
    said = []
    several = [f"{len(t.values)} from stage {t.source} to {t.target}" for t in plan.transfers if len(t.values) > 1]
    if several:
        said.append(
            f"The model branches, and several values cross cuts ({', '.join(several)}): layers are a sequence here, so "
            "the layers at the cuts must take and return these values as a tuple."
        )
    skips = [(t.source, t.target) for t in plan.transfers if t.target > t.source + 1]
    if skips:
        pairs = ", ".join(f"{source} to {target}" for source, target in skips)
        said.append(
            f"Values skip stages here (from stage {pairs}): the layers in between must take them and pass them on."
        )
    for stages, names in shared_weights(plan).items():
        said.append(
            f"Stages {', '.join(map(str, stages))} share {', '.join(names)}: tie them there, or each stage trains "
            "its own copy."
        )
    if plan.loss is not None and plan.loss.weighs:
        what = "a sum" if plan.loss.over == "sum" else "a mean over the labels that count"
        said.append(
            f"The loss is {what}, and `plan train` weighs microbatches by it. {system} takes the mean of the "
            "microbatches' losses, which is another loss: weigh them in the loss function."
        )
    if max(plan.degrees) > 1:
        said.append(
            f"Groups of {max(plan.degrees)} ranks divide the layers. {system}'s layers say themselves what is divided "
            "of them; the plan's costs are of what the planned model says."
        )
    if plan.autocast is not None:
        said.append(f"The plan is for {plan.autocast} under autocast: use the same here.")
    if plan.memory_format is not None:
        said.append(f"The plan is for {plan.memory_format} weights and images: use the same memory format.")
    if plan.compiled:
        said.append("The plan is for stages compiled with torch.compile: compile them.")
    return said


def stage_layers(plan: Plan) -> str:
    """Write the layers of each stage as Python source, one stage per line."""
    return "[\n" + "".join(f"    {json.dumps(list(stage.layers))},\n" for stage in plan.stages) + "]"


def comment(sentences: list[str], width: int = 100) -> str:
    """Write sentences as comment lines."""
    return "\n".join(line for text in sentences for line in textwrap.wrap(f"# {text}", width, subsequent_indent="# "))
