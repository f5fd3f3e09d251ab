"""Plan + model file -> the modules of a worker's stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.errors import ModelFileError, PlanError
from planner.executor.communication.shared import separate_copies, use_parameters
from planner.executor.job import TrainingOptions
from planner.formats.plan import Plan, Transfer
from planner.formats.shared_weights import obstacle, shared_weights
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.load import capture_file
from planner.model.options import module_options
from planner.model.spec import TrainingSpec
from planner.model.stage.deferred_weights import build_deferred, materialize
from planner.model.stage.evaluation import EvaluationStages, build_evaluation
from planner.model.stage.stage import StageModule, build_stage

Shared = Mapping[tuple[int, int], Collection[str]]  # by two stages, the trained weights that both hold


@dataclass(frozen=True)
class Modules:
    """A worker's stages by number; `evaluation` has those of the evaluation graph, with the same weights.

    `shared`: what any two stages of the plan share, be they this worker's or not.
    """

    training: dict[int, StageModule]
    evaluation: EvaluationStages | None
    shared: Shared


def build_modules(
    plan: Plan,
    stages: Sequence[int],
    spec: TrainingSpec,
    seed: int,
    *,
    defer_weights: bool,
    evaluate: bool = False,
    defer_batch_norm: bool = False,
) -> Modules:
    """Build the model, capture it, and keep the layers of `stages`; with `defer_weights`, make no other weights.

    Args:
        plan: whose model it must be.
        stages: of this worker.
        spec: the user's.
        seed: of the initial weights.
        defer_weights: make the weights of `stages` alone.
        evaluate: make the stages of the evaluation graph, too.
        defer_batch_norm: let BatchNorms in training gather their statistics; see `MinibatchStatistics`.

    Raises:
        PlanError: when the plan has no model, when the captured model is not the one that was profiled, or when
            stages share a weight whose copies the schedule cannot keep equal.
    """
    if not plan.trainable or plan.microbatch_size is None:
        raise PlanError(
            f"the plan for '{plan.model}' comes from an imported profile, which holds no model to train",
            hint="profile your model file with: plan profile model.py",
        )
    torch.manual_seed(seed)
    model = build_deferred(spec.build_model, seed) if defer_weights else spec.build_model()
    example = spec.example_batch(plan.microbatch_size)
    graph = capture_file(spec, example, model, options=module_options(plan))
    if graph.hash != plan.graph_hash:
        raise PlanError(
            f"the plan was made for another model than '{spec.origin}': graph {plan.graph_hash} in the plan, "
            f"{graph.hash} captured",
            hint="profile and solve again: plan profile, plan solve",
        )
    shared = _shared(plan, graph)
    evaluation = None
    if evaluate:
        evaluation = capture_file(spec, example, model, training=False, options=module_options(plan))
    if defer_weights:
        own = {name for stage in stages for name in plan.stages[stage].layers}
        wanted = [name for layer in graph.layers if layer.name in own for name in layer.parameters]
        materialize(graph.model, spec.build_model, seed, set(graph.names_of(wanted)))
    modules = {
        stage: build_stage(
            graph, plan.stages[stage].layers, compile_=bool(plan.compiled), defer_batch_norm=defer_batch_norm
        )
        for stage in stages
    }
    separate_copies(list(modules.values()))
    if evaluation is None:
        return Modules(modules, None, shared)
    cut = [stage.layers for stage in plan.stages]
    evaluated = build_evaluation(graph, cut, evaluation, stages, output=spec.defines("metrics"))
    for stage, module in evaluated.modules.items():
        use_parameters(module, modules[stage])
    return Modules(modules, evaluated, shared)


def _shared(plan: Plan, graph: LayerGraph) -> Shared:
    trained = {name for name, parameter in graph.model.named_parameters() if parameter.requires_grad}
    layers = [stage.layers for stage in plan.stages]
    weights = list(shared_weights(layers, {each.name: trained.intersection(each.parameters) for each in graph.layers}))
    if problem := obstacle(plan, weights):
        raise PlanError(problem[0], hint=problem[1])
    found: dict[tuple[int, int], set[str]] = {}
    for weight in weights:
        found.setdefault(weight.stages, set()).add(weight.name)
    return found


def check_shared(plan: Plan, shared: Shared, spec: TrainingSpec, options: TrainingOptions) -> None:
    """The copies of a shared weight must all take the same steps.

    Raises:
        PlanError: where options or the model file would have them take others.
    """
    if not shared or not plan.schedule.asynchronous:
        return
    (stages, names), *_ = sorted(shared.items())
    sentence = f"stages {stages[0]} and {stages[1]} share the weight '{min(names)}' under {plan.schedule}"
    hint = "take a schedule that drains, such as 1f1b-flush; or keep the weight in one stage with --colocate"
    if options.clip_grad_norm is not None:
        raise PlanError(f"{sentence}, whose stages clip their gradients each by its own norm", hint=hint)
    if plan.schedule.stashes and spec.defines("scheduler"):
        raise PlanError(
            f"{sentence}, whose stages are at different steps of scheduler() when they update it", hint=hint
        )


def check_sizes(modules: Iterable[StageModule], sizes: Iterable[int]) -> None:
    """The stages must be able to take microbatches of `sizes` samples.

    Raises:
        ModelFileError: when they are not.
    """
    for module in modules:
        for size in sorted(set(sizes) - {0}):
            if module.fixed_batch_size not in (None, size):
                raise ModelFileError(
                    f"the model takes microbatches of {module.fixed_batch_size} samples only, and the last minibatch "
                    f"of an epoch has some of {size}",
                    hint="train with --drop-last, which leaves it out",
                )
            if size < module.least_batch_size:
                raise ModelFileError(
                    f"the last minibatch of an epoch has microbatches of {size} sample, of which BatchNorm cannot take "
                    "the variance",
                    hint="train with --drop-last, which leaves it out",
                )


def transferred(plan: Plan, modules: Mapping[int, StageModule]) -> dict[tuple[int, int], list[ValueSpec]]:
    """By (source, target) stage, the values that travel to and from the stages in `modules`.

    Raises:
        PlanError: when the plan sends what the stages do not exchange.
    """
    return {
        (t.source, t.target): _specs_of(t, [modules[stage] for stage in (t.source, t.target) if stage in modules])
        for t in plan.transfers
        if t.source in modules or t.target in modules
    }


def _specs_of(transfer: Transfer, ends: Iterable[StageModule]) -> list[ValueSpec]:
    specs = {spec.name: spec for end in ends for spec in (*end.received, *end.sent)}
    missing = [name for name in transfer.values if name not in specs]
    if missing:
        raise PlanError(
            f"the plan sends value '{missing[0]}' from stage {transfer.source} to {transfer.target}, but the stages "
            "do not exchange it",
            hint="make the plan again with: plan solve",
        )
    return [specs[name] for name in transfer.values]
