"""Carry the cut of a training graph over to the graph of the same model in evaluation mode, with
the same weights.
"""

from collections.abc import Callable, Mapping, Sequence
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
    holders: dict[str, set[int]] = {}
    for layer in training.layers:
        for name in (*layer.parameters, *layer.buffers):
            holders.setdefault(name, set()).add(stage_of[layer.name])
    # a stage that holds all weights of a layer, preferably that of its name
    fixed: list[int | None] = []
    for layer in evaluation.layers:
        possible = [
            holders[name] for name in (*layer.parameters, *layer.buffers) if name in holders
        ]
        # tied weights may be in several stages
        common = set[int]().union(*possible).intersection(*possible)
        named = stage_of.get(layer.name)
        # No stage is -1, which is behind all others, where several hold the weights.
        fixed.append(named if named in common else min(common, default=-1 if possible else None))
    planned = [training.position[name] for names in cut for name in names]
    followed = _next_layers(evaluation) if planned == sorted(planned) else evaluation.needs
    # Names tell less than weights: a module that is called several times numbers its calls. So a
    # weightless layer goes no further than the next layers with weights.
    ahead = [len(cut) - 1 if stage is None else stage for stage in fixed]
    for index in reversed(range(len(ahead))):
        for earlier in followed[index]:
            if fixed[earlier] is None:
                ahead[earlier] = min(ahead[earlier], ahead[index])

    stages: list[list[str]] = [[] for _ in cut]
    chosen: list[int] = []
    for index, layer in enumerate(evaluation.layers):
        least = max((chosen[earlier] for earlier in followed[index]), default=0)
        if ahead[index] < least:
            raise CaptureError(
                f"in evaluation layer '{layer.name}' runs after layers of stage {least}, but an "
                f"earlier stage or "
                "several hold the weights",
                hint="cut the model elsewhere, or evaluate the unsplit model with the saved "
                "weights",
            )
        wanted = fixed[index]
        if wanted is None:
            wanted = stage_of.get(layer.name, chosen[-1] if chosen else 0)
        stage = min(max(least, wanted), ahead[index])
        chosen.append(stage)
        stages[stage].append(layer.name)
    return stages


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
) -> EvaluationStages:
    """Return the stages of `evaluation` that match those of `cut`, which are `of` these in
    training.

    `output`: whether the last receives the model's.
    """
    stages = matching_cut(training, cut, evaluation)
    stage_of = {
        evaluation.position[name]: stage for stage, names in enumerate(stages) for name in names
    }
    last = stage_of[evaluation.owner[evaluation.loss]]
    outputs = _outputs(evaluation, stage_of, last) if output else []
    keep = [node.name for node in outputs]
    transfers: dict[tuple[int, int], list[ValueSpec]] = {}
    for node, index in evaluation.owner.items():
        users = {
            stage_of[evaluation.owner[user]] for user in node.users if user in evaluation.owner
        }
        users = set() if node in evaluation.fixed else users  # each stage makes it itself
        if node in outputs:
            users.add(last)
        # A node with users in later stages has a spec: otherwise its layer would have been joined
        # with theirs.
        for source, target in pairwise(sorted({stage_of[index], *users})):
            transfers.setdefault((source, target), []).append(evaluation.specs[node])
    modules = {}
    for stage in (number for number in wanted if stages[number]):
        variant = Variant(division=division)
        whole = None if of is None else of[stage]
        if whole is not None and whole.units is not None:
            found = matching_cut(training, whole.units.layers, evaluation)
            variant = replace(variant, units=tuple(map(tuple, found)))
        before = [name for names in stages[:stage] for name in names]
        modules[stage] = build_stage(evaluation, stages[stage], keep, variant, whole, before)
    made = _model_output(evaluation) if output else lambda _known, _batch: None
    return EvaluationStages(
        modules,
        transfers,
        last,
        made,
        evaluation.batch_size,
        evaluation.options.autocast,
        evaluation.lengths,
    )


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
