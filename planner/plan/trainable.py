"""Check that the executor can train a plan: `train` asks before it starts, and `price` before it
gives an answer.
"""

from planner.errors import InputError, PlanError
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.shape import check_divided_loss
from planner.plan.shared_weights import obstacle, shared_weights, trained_parameters
from planner.schedule.schedule import Schedule
from planner.stages.tensor import one_degree


def check_priced(plan: Plan, profile: Profile, *, accepted: bool) -> None:
    """Raise InputError for a plan of a model that `train` would refuse; `accepted`: that its loss
    is divided.

    An imported profile holds no model, so its plans are priced whatever they are.
    """
    if not plan.trainable:
        return
    if not plan.divides_sequences:  # whose prices are for other trainers
        check_trainable(plan)
    check_divided_loss(plan.model, plan.loss, plan.schedule, plan.microbatches, accepted=accepted)
    shared = list(
        shared_weights([stage.layers for stage in plan.stages], trained_parameters(profile))
    )
    problem = obstacle(plan, shared)
    if problem is not None:
        raise PlanError(problem[0], hint=problem[1])
    if (
        any(stage.shards_optimizer for stage in plan.stages)
        and profile.optimizer_elementwise is False
    ):
        raise InputError(
            f"the optimizer of '{plan.model}' does not treat each element of a parameter alone, "
            f"so replicas cannot "
            "shard its state",
            hint="leave out `shard_optimizer`, or take an optimizer such as AdamW and profile "
            "again",
        )


def check_base(plan: Plan) -> None:
    """Raise PlanError for a plan with weights or products in fewer bits than the executor's, with
    experts across servers, or with sharded gradients of divided layers.
    """
    if plan.experts_across:
        raise PlanError(
            f"the plan's ranks shard experts in groups of {plan.ranks_per_replica}, sum the other "
            f"gradients once per update and shard their optimizer's state: planned and priced, "
            f"not trained by this package yet",
            hint="make a plan with `tensor=1`; or train with Megatron, which has such groups",
        )

    if plan.shards_divided_layers:
        raise PlanError(
            f"the plan's replicas shard gradients or weights of layers that groups of "
            f"{plan.ranks_per_replica} ranks shard, too, and the executor does one of the two: "
            f"planned and priced, not trained by this package yet",
            hint="make a plan with `tensor=1`; or train with torchtitan, where the plan says how "
            "fast that may be and what fits",
        )

    if plan.cluster.offload is not None:
        raise PlanError(
            "the plan has masters and the optimizer's state in the memory of the host, whose CPU "
            "steps them, and the executor has them on the GPUs, where they take more memory",
            hint="make a plan without `offload`; or train with DeepSpeed, where the plan says how "
            "fast that may be and what fits",
        )

    if plan.products is not None:
        raise PlanError(
            f"the plan is for products in {plan.products}, and the executor computes them in "
            f"{plan.master_weights or 'single precision'}, which takes longer",
            hint="make a plan without `precision`; or train with Megatron and Transformer Engine, "
            "where the plan says how fast that may be and what fits",
        )

    if plan.base_bits is not None:
        raise PlanError(
            f"the plan is for a frozen base in {plan.base_bits} bits, and the executor has it in "
            f"half precision, which takes more memory",
            hint="make a plan without `bits`; or train with transformers, peft and bitsandbytes, "
            "where the plan says how fast that may be and what fits",
        )


def split_compiled_words(schedule: Schedule) -> str:
    """Say why compiled stages have no schedule that splits their backward."""
    return (
        f"under {schedule} the gradients of weights are computed after those of inputs, and "
        f"torch.compile makes one function of both"
    )


def check_trainable(plan: Plan) -> None:
    """Raise PlanError for a plan that the executor cannot run."""
    if plan.compiled and plan.splits_backward:
        raise PlanError(
            split_compiled_words(plan.schedule),
            hint="solve with `schedule=1f1b-flush`, or profile without `compile`",
        )

    check_sequences(plan)
    check_divided(plan)
    ranks = sorted({rank for stage in plan.stages for rank in stage.ranks})
    if ranks != list(range(len(ranks))):
        idle = next(rank for rank in range(plan.cluster.gpus) if rank not in ranks)
        raise PlanError(
            f"the plan leaves GPU {idle} idle and uses later ones, but workers are numbered "
            f"without gaps",
            hint="solve for those that it uses, or list the kinds of GPUs in the cluster so that "
            "unused ones come last",
        )


def is_trained_here(plan: Plan) -> bool:
    """Return whether the executor runs a plan as it is priced; it needs the graph of the model."""
    try:
        check_base(plan)
        check_trainable(plan)
    except PlanError:
        return False
    return plan.trainable


def trains_sequences(plan: Plan) -> bool:
    """Return whether the executor divides the sequences of a plan, or the plan divides none."""
    return _obstacle_of_sequences(plan) is None


def check_sequences(plan: Plan) -> None:
    """Raise PlanError for ranks that divide sequences, and something beside them that the executor
    does not divide as well.
    """
    problem = _obstacle_of_sequences(plan)
    if problem is None:
        return
    what, hint = problem
    raise PlanError(
        f"`plan train` does not shard sequences {what}, and this plan shards them over "
        f"{plan.context_ranks} ranks (context parallelism)",
        hint=f"{hint}; or export it for a trainer that does: `system=torchtitan` or "
        "`system=megatron`",
    )


def _obstacle_of_sequences(plan: Plan) -> tuple[str, str] | None:
    """Return where the executor does not divide the sequences of a plan, with a hint."""
    if not plan.divides_sequences:
        return None
    if not plan.divides_alike or plan.ranks_per_replica != plan.context_ranks:
        what = f"in groups of {plan.ranks_per_replica} ranks, which divide layers as well"
        return what, "solve with `tensor=1`"
    if plan.by_samples:
        return "of models whose experts ranks shard", "solve with `tensor=1`"
    if any(stage.shards_optimizer for stage in plan.stages):
        return (
            "of replicas that shard their optimizer's state",
            "solve with `shard_optimizer=never`",
        )

    if plan.compiled:
        return "of compiled layers", "profile without `compile`"
    if plan.cluster.sequence_parallel:
        what = "with sequence parallelism, which shards tokens between sharded layers"
        return what, "solve without `sequence_parallel`"

    return None


def check_divided(plan: Plan) -> None:
    """Check that the executor can divide layers as a plan says; raise PlanError when it cannot."""
    if plan.stages[0].shards_gradients and (
        what := "compiled" if plan.compiled else plan.memory_format
    ):
        raise PlanError(
            f"the executor does not run {what} stages whose replicas shard gradients or weights",
            hint="profile without that, or solve with `shard_optimizer=never`",
        )

    if plan.chunked_loss is not None and (plan.stages[0].shards_gradients or plan.divides_layers):
        raise PlanError(
            "the executor does not compute a loss in chunks where ranks divide layers, or replicas "
            "shard gradients or weights",
            hint="make the plan again with: plan solve; its loss is then computed whole",
        )

    if not plan.divides_layers:
        return
    one = f"solve with one degree, `tensor={plan.ranks_per_replica}`"
    problem = None
    if len({(stage.ranks, stage.leaders) for stage in plan.stages}) > len(
        {stage.ranks for stage in plan.stages}
    ):
        problem = "stages on the same ranks whose groups have different sizes", one
    elif any(
        one_degree(plan.stages[stage] for stage in shared.stages) is None for shared in plan.shared
    ):
        problem = "stages that share a weight and whose groups have different sizes", one
    elif plan.compiled:
        problem = (
            "tensor parallelism of compiled layers",
            "profile without `compile`, or solve with `tensor=1`",
        )

    if problem is not None:
        raise PlanError(
            f"the executor does not run {problem[0]}, as '{plan.config}' has them", hint=problem[1]
        )
