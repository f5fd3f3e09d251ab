"""What no other system can express of a plan: errors for what it must have, remarks for what it does differently."""

import textwrap
from dataclasses import dataclass

from planner.errors import PlanError
from planner.formats.plan import Plan
from planner.plan.rank_groups import sample_parts

LEAST_PER_STAGE = 4  # microbatches per stage if the plan has one per minibatch, for a bubble of a fifth


@dataclass(frozen=True)
class Target:
    """A plan as another system runs it: whole pipelines are copied, whose layers equal groups divide."""

    replicas: int  # of every stage
    pipeline: int  # workers, or groups of them, that a pipeline has
    tensor: int  # ranks of a group; those that have samples of their own are replicas instead
    size: int | None  # samples of a microbatch, if known
    microbatches: int  # that each copy of the pipeline runs between two updates
    sharded: bool  # whether the system must divide the optimizer's state: in all stages, or in none
    remarks: list[str]  # how its schedule and messages differ from the plan's


def target_of(plan: Plan, system: str) -> Target:
    """Return how a system that copies whole pipelines runs a plan; raise PlanError if it cannot."""
    for numbers, what in ((plan.replicas, "replicas"), (plan.degrees, "ranks")):
        if len(set(numbers)) > 1:
            problem = f"{system} copies whole pipelines, so it has no form for '{plan.config}', whose stages have "
            problem += f"different numbers of {what}"
            raise PlanError(problem, hint="`plan train` runs it; `plan compare` prices straight pipelines")
    if plan.stages[0].level > 1 and system != "torchtitan":
        problem = f"{system} has no form for replicas that divide gradients or weights, as those of '{plan.config}' do"
        raise PlanError(problem, hint="export with `system=torchtitan`, or solve with `shard_optimizer=never`")
    replicas, pipeline = plan.replicas[0], plan.workers // len(plan.stages[0].ranks)
    ranks = [rank for stage in plan.stages[:pipeline] for rank in stage.ranks]
    if ranks != list(range(len(ranks))):
        problem = f"{system} numbers workers stage by stage, but the plan's ranks are {ranks}"
        raise PlanError(problem, hint="solve for one level, or list kinds of GPUs in the order of the stages")
    several = plan.schedule.stashes and len(plan.stages) > 1
    microbatches, left = divmod(plan.microbatches, replicas)
    if plan.schedule.stashes:
        microbatches = LEAST_PER_STAGE * len(plan.stages) if several else 1
    elif left:
        problem = f"{system} gives each pipeline equally many microbatches, but {plan.microbatches} do not divide by "
        raise PlanError(f"{problem}{replicas}", hint=f"solve with `microbatches={(microbatches + 1) * replicas}`")
    remarks = {
        f"The plan's schedule, {plan.schedule}, keeps the pipeline full by stashing weights. {system} drains it before "
        "every update, so expect fewer samples/s than the plan predicts.": plan.schedule.asynchronous,
        f"Gradients are accumulated over {LEAST_PER_STAGE} microbatches per stage. The plan updates after each one: "
        "adapt the learning rate.": several,
        f"The plan sends activations as {plan.cluster.compress}. {system} sends them as they are, so links are busier "
        "than the plan predicts.": plan.cluster.compress != "none",
    }
    sharded = any(stage.sharded for stage in plan.stages)
    said = [text for text, holds in remarks.items() if holds]
    copies = sample_parts(plan)
    size = plan.microbatch_size and plan.microbatch_size // copies
    return Target(replicas * copies, pipeline, plan.degrees[0] // copies, size, microbatches, sharded, said)


def shared_weights(plan: Plan) -> dict[tuple[int, ...], list[str]]:
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
    several = [f"{len(t.values)} from stage {t.source} to {t.target}" for t in plan.transfers if len(t.values) > 1]
    skips = [f"{t.source} to {t.target}" for t in plan.transfers if t.target > t.source + 1]
    degree, sharded = max(plan.degrees), [stage.sharded for stage in plan.stages]
    over = "sum" if plan.loss is not None and plan.loss.over == "sum" else "mean over the labels that count"
    remarks = {
        f"The model branches, and several values cross cuts ({', '.join(several)}): the layers there must take and "
        "return these values as a tuple.": several,
        f"Values skip stages (from stage {', '.join(skips)}): the layers in between must pass them on.": skips,
        **{
            f"Stages {', '.join(map(str, stages))} share {', '.join(names)}: tie them there, or each stage trains its "
            "own copy.": True
            for stages, names in shared_weights(plan).items()
        },
        f"The loss is a {over}, and `plan train` weighs microbatches by it. {system} takes the mean of their losses, "
        "which is another loss: weigh them in the loss function.": plan.loss is not None and plan.loss.weighs,
        f"Groups of {degree} ranks divide the layers. {system}'s layers say themselves what is divided of them; the "
        "plan's costs are of what the planned model says.": degree > 1 and not plan.by_samples,
        f"Of {plan.experts} experts of a layer, each of {degree} ranks has a part. {system} reduces the gradients of "
        "other weights once per minibatch, where `plan train` does so for every microbatch.": plan.by_samples,
        f"The plan divides the optimizer's state in some stages; {system} does so in all of them.": any(sharded)
        and not all(sharded),
        f"The plan is for {plan.autocast} under autocast: use the same here.": plan.autocast,
        f"The plan is for weights in {plan.master_weights} with float32 masters: do so here.": plan.master_weights,
        f"The plan is for {plan.memory_format} weights and images: use the same here.": plan.memory_format,
        "The plan is for stages compiled with torch.compile: use the same here.": plan.compiled,
    }
    return [text for text, holds in remarks.items() if holds]


def comment(sentences: list[str], width: int = 100) -> str:
    return "\n".join(line for text in sentences for line in textwrap.wrap(f"# {text}", width, subsequent_indent="# "))
