"""What no other system can express of a plan: errors for what it must have, remarks for what it does differently."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

from planner.errors import PlanError
from planner.formats.plan import Plan

LEAST_PER_STAGE = 4  # microbatches per stage if the plan has one per minibatch, for a bubble of a fifth


@dataclass(frozen=True)
class Target:
    """A plan as another system runs it: whole pipelines are copied, whose layers equal groups divide.

    Attributes:
        replicas: of every stage.
        pipeline: workers, or groups of them, that a pipeline has.
        tensor: ranks of a group.
        microbatches: that each copy of the pipeline runs between two updates.
        sharded: whether the system must divide the optimizer's state: it does so in all stages or in none.
        remarks: how its schedule and messages differ from the plan's.
    """

    replicas: int
    pipeline: int
    tensor: int
    microbatches: int
    sharded: bool
    remarks: list[str]


def target_of(plan: Plan, system: str) -> Target:
    """Return how a system that copies whole pipelines runs a plan.

    Raises:
        PlanError: if stages have different numbers of replicas or ranks, if ranks do not go stage by stage, or if the
            microbatches cannot be divided among the copies.
    """
    for numbers, what, hint in (
        (plan.replicas, "replicas", "`plan train` runs it; `plan compare` prices straight pipelines"),
        (plan.degrees, "ranks", "solve with one degree in `tensor`"),
    ):
        if len(set(numbers)) > 1:
            raise PlanError(
                f"{system} copies whole pipelines, so it has no form for '{plan.config}', whose stages have different "
                f"numbers of {what}",
                hint=hint,
            )
    replicas, pipeline = plan.replicas[0], plan.workers // len(plan.stages[0].ranks)
    ranks = [rank for stage in plan.stages[:pipeline] for rank in stage.ranks]
    if ranks != list(range(len(ranks))):
        raise PlanError(
            f"{system} numbers workers stage by stage, but the plan's ranks are {ranks}",
            hint="solve for a cluster of one level, or list its kinds of GPUs in the order of the stages",
        )
    if plan.schedule.stashes:
        microbatches = LEAST_PER_STAGE * len(plan.stages) if len(plan.stages) > 1 else 1
    else:
        microbatches, left = divmod(plan.microbatches, replicas)
        if left:
            raise PlanError(
                f"{system} gives each of the {replicas} pipelines the same number of microbatches, but "
                f"{plan.microbatches} do not divide by {replicas}",
                hint=f"solve with `microbatches={(microbatches + 1) * replicas}`",
            )
    sharded = any(stage.sharded for stage in plan.stages)
    said = []
    if plan.schedule.asynchronous:
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
    return Target(replicas, pipeline, plan.degrees[0], microbatches, sharded, said)


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


def model_remarks(plan: Plan, system: str) -> list[str]:
    """Say what the user who builds the layers for the system must know."""
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
    sharded = [stage.sharded for stage in plan.stages]
    if any(sharded) and not all(sharded):
        said.append(f"The plan divides the optimizer's state in some stages; {system} does so in all of them.")
    settings = [
        plan.autocast and f"{plan.autocast} under autocast",
        plan.memory_format and f"{plan.memory_format} weights and images",
        plan.compiled and "stages compiled with torch.compile",
    ]
    said += [f"The plan is for {setting}: use the same here." for setting in settings if setting]
    return said


def stage_layers(plan: Plan) -> str:
    """Write the layers of each stage as Python source, one stage per line."""
    return "[\n" + "".join(f"    {json.dumps(list(stage.layers))},\n" for stage in plan.stages) + "]"


def comment(sentences: list[str], width: int = 100) -> str:
    """Write sentences as comment lines."""
    return "\n".join(line for text in sentences for line in textwrap.wrap(f"# {text}", width, subsequent_indent="# "))
