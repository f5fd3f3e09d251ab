"""Carry the cut of a training graph over to the graph of the same model in evaluation mode, with
the same weights.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import CaptureError
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.lengths import Length
from planner.model.stage.graph_stage import CONSTANT
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.model.tensor.division import UNDIVIDED, DividedWeights


def matching_cut(
    training: LayerGraph, cut: Sequence[Sequence[str]], evaluation: LayerGraph
) -> list[list[str]]:
    """Return the layers of `evaluation` for each stage of `cut`; a stage may get none.

    A layer goes to the stage that holds its weights; without weights, to the stage of the layer of
    the same name; and without such a layer, to the stage of the layer before it. Values travel
    forward only, so no stage is before that of a layer whose result it takes; or, where the stages
    are in the model's order, before that of the layer before it.
    """
    stage_of = {name: stage for stage, names in enumerate(cut) for name in names}
    fixed = _stages_of_weights(training, stage_of, evaluation)
    planned = [training.position[name] for names in cut for name in names]
    followed: Sequence[Set[int]] = evaluation.needs
    if planned == sorted(planned):
        followed = _next_layers(evaluation)
    last = _last_stages(fixed, followed, len(cut) - 1)

    stages: list[list[str]] = [[] for _ in cut]
    chosen: list[int] = []
    for index, layer in enumerate(evaluation.layers):
        first = max((chosen[earlier] for earlier in followed[index]), default=0)
        if last[index] < first:
            raise CaptureError(
                f"in evaluation layer '{layer.name}' runs after layers of stage {first}, but an "
                f"earlier stage or several hold the weights",
                hint="cut the model elsewhere, or evaluate the unsplit model with the saved "
                "weights",
            )

        wanted = fixed[index]
        if wanted is None:
            wanted = stage_of.get(layer.name, chosen[-1] if chosen else 0)
        stage = min(max(first, wanted), last[index])
        chosen.append(stage)
        stages[stage].append(layer.name)

    return stages


def _stages_of_weights(
    training: LayerGraph, stage_of: Mapping[str, int], evaluation: LayerGraph
) -> list[int | None]:
    """Return the stage that holds all weights of each layer in evaluation, preferably that of the
    layer's name; None for a layer without weights, and -1, which is before all stages, where
    several hold parts of them.
    """
    holders: dict[str, set[int]] = {}
    for layer in training.layers:
        for name in (*layer.parameters, *layer.buffers):
            holders.setdefault(name, set()).add(stage_of[layer.name])

    stages: list[int | None] = []
    for layer in evaluation.layers:
        weights = (*layer.parameters, *layer.buffers)
        possible = [holders[name] for name in weights if name in holders]
        if not possible:
            stages.append(None)
            continue
        common = set.intersection(*possible)  # several, where weights are tied
        named = stage_of.get(layer.name)
        stages.append(named if named in common else min(common, default=-1))

    return stages


def _last_stages(fixed: Sequence[int | None], followed: Sequence[Set[int]], last: int) -> list[int]:
    """Return the last stage that each layer may be in.

    Names tell less than weights: a module that is called several times numbers its calls. So a
    layer without weights goes no further than the next layers with weights.
    """
    limits = [last if stage is None else stage for stage in fixed]
    for index in reversed(range(len(limits))):
        for earlier in followed[index]:
            if fixed[earlier] is None:
                limits[earlier] = min(limits[earlier], limits[index])
    return limits


def _next_layers(graph: LayerGraph) -> list[set[int]]:
    """Return, for each layer, the one before it."""
    return [set(range(max(0, index - 1), index)) for index in range(len(graph.layers))]


# of the values at the last stage, by name
ModelOutput = Callable[[Mapping[str, Tensor], Batch], Any]


@dataclass(frozen=True, eq=False)
class EvaluationStages:
    """The stages of an evaluation graph, and the values that they exchange."""

    modules: Mapping[int, StageModule]  # the wanted stages that have layers
    # by (source, target); each is passed from user to user
    transfers: Mapping[tuple[int, int], Sequence[ValueSpec]]
    last: int  # the stage that has the loss, and receives the model's output
    output: ModelOutput  # returns None where nobody asked for the output
    batch_size: int | None  # the only one that the stages accept; None where they accept any
    autocast: torch.dtype | None  # that they run under
    lengths: tuple[Length, ...] = ()  # that vary


def build_evaluation(
    training: LayerGraph,
    cut: Sequence[Sequence[str]],
    evaluation: LayerGraph,
    wanted: Sequence[int],
    *,
    output: bool,
    division: DividedWeights = UNDIVIDED,
    of: Mapping[int, StageModule] | None = None,
    loss_chunks: int = 1,
) -> EvaluationStages:
    """Return the stages of `evaluation` that match those of `cut`, which are `of` these in
    training.

    `output`: whether the last receives the model's. `loss_chunks`: in which it computes the loss,
    where nobody asks for the output.
    """
    stages = matching_cut(training, cut, evaluation)
    stage_of = {
        evaluation.position[name]: stage for stage, names in enumerate(stages) for name in names
    }
    last = stage_of[evaluation.owner[evaluation.loss]]
    outputs = []
    assemble: ModelOutput = _no_output
    if output:
        outputs = _outputs(evaluation, stage_of, last)
        assemble = _model_output(evaluation)

    keep = [node.name for node in outputs]
    modules = {}
    for stage in wanted:
        if not stages[stage]:
            continue
        trained = None if of is None else of[stage]
        variant = Variant(division=division, loss_chunks=1 if output else loss_chunks)
        if trained is not None and trained.units is not None:
            units = matching_cut(training, trained.units.layers, evaluation)
            variant = replace(variant, units=tuple(map(tuple, units)))
        before = [name for names in stages[:stage] for name in names]
        modules[stage] = build_stage(evaluation, stages[stage], keep, variant, trained, before)

    return EvaluationStages(
        modules,
        _transfers(evaluation, stage_of, outputs, last),
        last,
        assemble,
        evaluation.batch_size,
        evaluation.options.autocast,
        evaluation.lengths,
    )


def _transfers(
    graph: LayerGraph, stage_of: Mapping[int, int], outputs: Sequence[fx.Node], last: int
) -> dict[tuple[int, int], list[ValueSpec]]:
    """Return the values that stages exchange, by source and target; the last one gets the model's
    `outputs`, too.
    """
    transfers: dict[tuple[int, int], list[ValueSpec]] = {}
    for node, index in graph.owner.items():
        users = set()
        if node not in graph.fixed:  # which each stage makes itself
            users = {stage_of[graph.owner[user]] for user in node.users if user in graph.owner}
        if node in outputs:
            users.add(last)
        # A node with users in later stages has a spec: otherwise its layer would have been joined
        # with theirs.
        for source, target in pairwise(sorted({stage_of[index], *users})):
            transfers.setdefault((source, target), []).append(graph.specs[node])

    return transfers


def _no_output(_known: Mapping[str, Tensor], _batch: Batch) -> None:
    return None


def _model_output(graph: LayerGraph) -> ModelOutput:
    """Return how the output is assembled: by names, because a node leads to the whole model's
    weights.
    """
    spec = graph.output_spec
    inputs = [leaf.name for leaf in graph.inputs]
    # Tensors by name; what is no tensor, in a tuple, as it is.
    leaves = [leaf.name if isinstance(leaf, fx.Node) else (leaf,) for leaf in graph.outputs]

    def output(known: Mapping[str, Tensor], batch: Batch) -> Any:
        found = dict(zip(inputs, batch.flatten()[0], strict=True)) | dict(known)
        return spec.unflatten(
            [found[leaf] if isinstance(leaf, str) else leaf[0] for leaf in leaves]
        )

    return output


def _outputs(graph: LayerGraph, stage_of: Mapping[int, int], last: int) -> list[fx.Node]:
    if graph.blocks is not None and graph.blocks.layers[-1].blocks:
        raise CaptureError(
            "the last block shares a layer with the loss, so metrics(output, target) cannot have "
            "its output",
            hint="let the last of blocks(model) return tensors, within tuples, lists and dicts",
        )

    nodes = [
        leaf for leaf in graph.outputs if isinstance(leaf, fx.Node) and leaf.op != "placeholder"
    ]
    for node in nodes:
        if node not in graph.owner or (
            stage_of[graph.owner[node]] != last and node not in graph.specs
        ):
            raise CaptureError(
                f"the model's output has a value, '{node.name}', that cannot travel to the stage "
                f"that has the loss",
                hint="cut the model elsewhere, or evaluate without metrics(output, target)",
            )

    return nodes


def separate_buffers(evaluation: StageModule) -> None:
    """Give a stage in evaluation buffers of its own, which may then differ from those of the stage
    in training.
    """
    for module in evaluation.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.clone()


def share_buffers(evaluation: StageModule, training: StageModule) -> None:
    """Let a stage in evaluation use the buffers of the stage in training, which moving to a device
    has replaced.
    """
    holders = dict(evaluation.named_modules(remove_duplicate=False))
    for name, buffer in training.named_buffers(remove_duplicate=False):
        path, _, last = name.rpartition(".")
        # Evaluation may not use it. Graphs number their constants: one of the same name may be
        # another one.
        if path in holders and last in holders[path]._buffers and not name.startswith(CONSTANT):
            holders[path]._buffers[last] = buffer
