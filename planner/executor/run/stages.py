"""Build the modules of a worker's stages from the plan and the model, and the group of ranks that divides them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.errors import ModelFileError, PlanError
from planner.executor.communication.shared_gradients import separate_copies, use_parameters
from planner.executor.run.initial import initial_model
from planner.formats.plan import Plan
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.spec import TrainingSpec
from planner.model.stage.evaluation import EvaluationStages, build_evaluation
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.model.tensor.division import UNDIVIDED, division_of, keep_parts
from planner.model.tensor.parallel_plan import tensor_parallel_plan
from planner.plan.shared_weights import SharedWeight, obstacle, shared_weights
from planner.workers.job import Job

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup


def tensor_group(plan: Plan, rank: int) -> TensorGroup | None:
    """Return the group of ranks that divides a worker's layers; None where each is whole on a rank.

    Raises:
        PlanError: for divided layers that the executor does not run.
    """
    check_divided(plan)
    own = next(stage for stage in plan.stages if rank in stage.ranks)
    if own.tensor == 1:
        return None
    from planner.model.tensor.group import TensorGroup  # with DTensor, whose import takes a second

    return TensorGroup(own.tensor, own.ranks.index(rank) % own.tensor)


def check_divided(plan: Plan) -> None:
    """Check that the executor can divide layers as a plan says.

    Raises:
        PlanError: when it cannot.
    """
    if max(plan.degrees) == 1:
        return
    one = f"solve with one degree, `tensor={max(plan.degrees)}`"
    problem = None
    if len({(stage.ranks, stage.tensor) for stage in plan.stages}) > len({stage.ranks for stage in plan.stages}):
        problem = "stages on the same ranks whose groups have different sizes", one
    elif any(len({plan.stages[stage].tensor for stage in shared.stages}) > 1 for shared in plan.shared):
        problem = "stages that share a weight and whose groups have different sizes", one
    elif plan.cluster.sequence_parallel:
        problem = "sequence parallelism", "it is priced alone: solve without `sequence_parallel`"
    elif plan.compiled:
        problem = "divided layers that are compiled", "profile without `compiled`, or solve with `tensor=1`"
    if problem is not None:
        raise PlanError(f"the executor does not run {problem[0]}, as '{plan.config}' has them", hint=problem[1])


SharedNames = Mapping[tuple[int, int], Collection[str]]  # for two stages, the trained weights that both hold


@dataclass(frozen=True)
class Modules:
    """A worker's stages."""

    training: dict[int, StageModule]  # by number
    evaluation: EvaluationStages | None  # the same stages of the evaluation graph, with the same parameters
    shared: SharedNames  # of all stages of the plan, on this worker or not
    deferred: bool  # whether no other stage's weights were made to build them


def build_modules(
    job: Job, stages: Sequence[int], spec: TrainingSpec, kind: str, tensor: TensorGroup | None = None
) -> Modules:
    """Build the model, capture it, and keep the layers of `stages`.

    The modules have no reference to the model or its graph, so the weights of other stages are freed with these.

    Args:
        job: with the plan, whose model it must be.
        kind: of the device that trains, "cpu" or "cuda".
        tensor: the ranks that divide the stages' layers; None where each is whole on a rank.

    Raises:
        PlanError: when the plan has no model, when the captured model is not the one that was profiled, or when
            stages share a weight whose copies the schedule cannot keep equal.
    """
    plan = job.plan
    if not plan.trainable or plan.microbatch_size is None:
        raise PlanError(
            f"the plan for '{plan.model}' comes from an imported profile, which holds no model to train",
            hint="profile your model file with: plan profile model.py",
        )
    initial = initial_model(job, stages, spec, kind)
    graph, evaluated = initial.graph, None
    shared = _shared(job, graph, spec)
    division = UNDIVIDED
    if tensor is not None:
        division = division_of(graph, tensor_parallel_plan(spec, graph, tensor.degree), tensor)
    # An undivided minibatch is its own microbatch, whose statistics are the whole minibatch's.
    defer_norms = job.options.deferred_batch_norm and plan.microbatches > 1
    alike = Variant(compiled=plan.compiled, defer_batch_norm=defer_norms, division=division)
    modules = {}
    for number in stages:
        stage = plan.stages[number]
        variant = replace(alike, recompute=stage.recompute_groups)
        modules[number] = build_stage(graph, stage.layers, variant=variant)
    separate_copies(list(modules.values()))
    for module in modules.values():
        keep_parts(module)
    if initial.evaluation is not None:
        cut, output = [stage.layers for stage in plan.stages], spec.defines("metrics")
        evaluated = build_evaluation(graph, cut, initial.evaluation, stages, output=output, division=division)
        for number, module in evaluated.modules.items():
            use_parameters(module, modules[number])
    return Modules(modules, evaluated, shared, initial.deferred)


def _shared(job: Job, graph: LayerGraph, spec: TrainingSpec) -> SharedNames:
    trained = {name for name, parameter in graph.model.named_parameters() if parameter.requires_grad}
    layers = [stage.layers for stage in job.plan.stages]
    weights = list(shared_weights(layers, {each.name: trained.intersection(each.parameters) for each in graph.layers}))
    if problem := obstacle(job.plan, weights) or _different_steps(job, weights, spec):
        raise PlanError(problem[0], hint=problem[1])
    found: dict[tuple[int, int], set[str]] = {}
    for weight in weights:
        found.setdefault(weight.stages, set()).add(weight.name)
    return found


def _different_steps(job: Job, shared: Sequence[SharedWeight], spec: TrainingSpec) -> tuple[str, str] | None:
    """Say why the copies of a shared weight would not all take the same steps, and a hint; None if they do."""
    schedule = job.plan.schedule
    if not shared or not schedule.asynchronous:
        return None
    if job.options.late_lr:
        why = "whose stages have learning rates of their own with `late_lr`"
    elif job.options.clip_grad_norm is not None:
        why = "whose stages clip their gradients each by its own norm"
    elif job.scales_loss:
        why = "whose stages scale float16 losses each by its own factor"
    elif schedule.stashes and spec.defines("scheduler"):
        why = "whose stages are at different steps of scheduler() when they update it"
    else:
        return None
    return (
        shared[0].sentence(f" under {schedule}, {why}"),
        f"{shared[0].together}; or take a schedule that drains, such as 1f1b-flush",
    )


def check_sizes(modules: Iterable[StageModule], sizes: Iterable[int], *, of_start: bool = False) -> None:
    """Check that the stages accept microbatches of `sizes` samples: of an epoch's end, or of a synchronous start.

    Raises:
        ModelFileError: when they do not.
    """
    for module in modules:
        for size in sorted(set(sizes) - {0}):
            problem = None
            if module.fixed_batch_size not in (None, size):
                problem = f"and the model takes microbatches of {module.fixed_batch_size} samples only"
            elif size < module.least_batch_size:
                problem = "of which BatchNorm cannot take the variance"
            if problem is not None:
                whose = "a minibatch of the synchronous start" if of_start else "the last minibatch of an epoch"
                raise ModelFileError(
                    f"{whose} has microbatches of {size} sample{'s' * (size > 1)}, {problem}",
                    hint="leave out `synchronous_start`" if of_start else "leave it out with `drop_last`",
                )


def transferred(plan: Plan, modules: Mapping[int, StageModule]) -> dict[tuple[int, int], list[ValueSpec]]:
    """Return, by (source, target) stage, the values that travel to and from the stages in `modules`.

    Raises:
        PlanError: when the plan sends a value that the stages do not exchange.
    """
    found = {}
    for t in plan.transfers:
        ends = [modules[stage] for stage in (t.source, t.target) if stage in modules]
        specs = {spec.name: spec for end in ends for spec in (*end.received, *end.sent)}
        missing = next((name for name in t.values if name not in specs), None)
        if ends and missing is not None:
            raise PlanError(
                f"the plan sends value '{missing}' from stage {t.source} to {t.target}, but the stages do not "
                "exchange it",
                hint="make the plan again with: plan solve",
            )
        if ends:
            found[t.source, t.target] = [specs[name] for name in t.values]
    return found
