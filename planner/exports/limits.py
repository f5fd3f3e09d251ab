"""What of a plan the other systems have in common not to express."""

from __future__ import annotations

from planner.errors import PlanError
from planner.formats.plan import Plan

LEAST_PER_STAGE = 4  # microbatches per stage where the plan has one: the bubble is then a fifth


def equal_replicas(plan: Plan, system: str) -> int:
    """The replicas of every stage: these systems copy whole pipelines.

    Raises:
        PlanError: when stages differ in them, when they are no pipeline, or when ranks do not go stage by stage.
    """
    replicas = set(plan.replicas)
    if len(replicas) > 1:
        raise PlanError(
            f"{system} copies whole pipelines, so it has no form for '{plan.config}', whose stages have different "
            "numbers of replicas",
            hint="`plan train` runs it; `plan compare` prices straight pipelines",
        )
    ranks = [rank for stage in plan.stages[: plan.workers // plan.stages[0].replicas] for rank in stage.ranks]
    if ranks != list(range(len(ranks))):
        raise PlanError(
            f"{system} numbers workers stage by stage, and the plan's ranks are {ranks}",
            hint="list the kinds of GPUs in the cluster in the order of the stages",
        )
    return replicas.pop()


def microbatches_per_pipeline(plan: Plan, replicas: int, system: str) -> int:
    """Microbatches that each copy of the pipeline runs between two updates.

    Raises:
        PlanError: when the plan's do not divide.
    """
    if plan.schedule == "1f1b":
        return LEAST_PER_STAGE * len(plan.stages) if len(plan.stages) > 1 else 1
    if plan.microbatches % replicas:
        raise PlanError(
            f"{system} gives each of the {replicas} pipelines as many microbatches, and {plan.microbatches} do not "
            f"divide by {replicas}",
            hint=f"solve with `microbatches={plan.microbatches // replicas * replicas + replicas}`",
        )
    return plan.microbatches // replicas


def never_drains(plan: Plan) -> bool:
    """Whether the plan's schedule has what none of these systems has: weights of several versions."""
    return plan.schedule in ("1f1b", "2bw")


def shared_weights(plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """The weights that several stages train, by these stages."""
    holders: dict[str, set[int]] = {}
    for shared in plan.shared:
        for name in shared.weights:
            holders.setdefault(name, set()).update(shared.stages)
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stages in sorted(holders.items()):
        found.setdefault(tuple(sorted(stages)), []).append(name)
    return found


def remarks(plan: Plan, system: str) -> list[str]:
    """Sentences on what the system does in another way than the plan."""
    said = []
    if never_drains(plan):
        said.append(
            f"The plan's schedule, {plan.schedule}, keeps the pipeline full by stashing weights. {system} has no such "
            "schedule: it empties the pipeline before every update, so expect fewer samples/s than the plan says."
        )
        if plan.schedule == "1f1b" and len(plan.stages) > 1:
            said.append(
                f"Gradients are summed over {LEAST_PER_STAGE} microbatches per stage, where the plan updates after "
                "each: choose the learning rate anew."
            )
    if system == "torch.distributed.pipelining":
        return said
    said += _by_hand(plan)
    return said


def _by_hand(plan: Plan) -> list[str]:
    """What the plan knows of the model, and whoever builds the layers there has to see to."""
    said = []
    several = [f"{len(t.values)} from stage {t.source} to {t.target}" for t in plan.transfers if len(t.values) > 1]
    if several:
        said.append(
            f"The model branches, and several values cross cuts ({', '.join(several)}): layers are a sequence here, so "
            "those beside the cuts must take and return them as a tuple."
        )
    skips = [(t.source, t.target) for t in plan.transfers if t.target > t.source + 1]
    if skips:
        pairs = ", ".join(f"{source} to {target}" for source, target in skips)
        said.append(
            f"Values skip stages here (from stage {pairs}): the layers between must take them and hand them on."
        )
    for stages, names in shared_weights(plan).items():
        said.append(
            f"Stages {', '.join(map(str, stages))} share {', '.join(names)}: tie them there, or each stage trains a "
            "copy of its own."
        )
    if plan.autocast is not None:
        said.append(f"The plan is for {plan.autocast} under autocast: set the same here.")
    if plan.memory_format is not None:
        said.append(f"The plan is for {plan.memory_format} weights and images: lay them out so.")
    if plan.compiled:
        said.append("The plan is for stages through torch.compile: compile them.")
    return said


def comment(sentences: list[str], width: int = 100) -> str:
    """`sentences` as comment lines."""
    import textwrap

    return "\n".join(line for text in sentences for line in textwrap.wrap(f"# {text}", width, subsequent_indent="# "))
