"""The cut of a training graph, carried over to the evaluation graph of the same model.

Dropout and BatchNorm do something else in evaluation, and a model may run other layers then; the train flag is baked
into a graph. So evaluation needs a graph of its own, whose stages hold the weights that training left them.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import CaptureError
from planner.model.graph import GraphLayer, LayerGraph


def matching_cut(training: LayerGraph, cut: Sequence[Sequence[str]], evaluation: LayerGraph) -> list[list[str]]:
    """Layers of `evaluation` for each stage of `cut`; a stage may be left without any.

    A layer goes to the stage that holds its weights, or else to that of the layer of the same name, or else to that of
    the layer before it.

    Args:
        training: the graph that was cut.
        cut: names of its layers, stage by stage.
        evaluation: of the same model, captured with `training=False`.

    Raises:
        CaptureError: when a layer comes before another one whose stage is earlier.
    """
    stage_of = {name: stage for stage, names in enumerate(cut) for name in names}
    holders: dict[str, set[int]] = {}
    for layer in training.layers:
        for name in (*layer.parameters, *layer.buffers):
            holders.setdefault(name, set()).add(stage_of[layer.name])
    fixed = [_stage_of_weights(layer, holders, stage_of.get(layer.name)) for layer in evaluation.layers]
    stages: list[list[str]] = [[] for _ in cut]
    current = 0
    for index, layer in enumerate(evaluation.layers):
        # Names of weightless layers are less sure: a module that is called often numbers its calls.
        ahead = next((stage for stage in fixed[index:] if stage is not None), len(cut) - 1)
        if ahead < current:
            raise CaptureError(
                f"in evaluation layer '{layer.name}' runs after layers of stage {current}, but stage {ahead} holds "
                "the weights",
                hint="cut the model elsewhere, or evaluate the unsplit model with the saved weights",
            )
        current = min(max(current, stage_of.get(layer.name, current)), ahead)
        stages[current].append(layer.name)
    return stages


def _stage_of_weights(layer: GraphLayer, holders: dict[str, set[int]], named: int | None) -> int | None:
    """The stage that holds all weights of `layer`; None for a layer without. Tied ones may be in several."""
    possible = [holders[name] for name in (*layer.parameters, *layer.buffers) if name in holders]
    if not possible:
        return None
    common = set.intersection(*possible)
    if not common:
        raise CaptureError(
            f"in evaluation layer '{layer.name}' needs weights that training holds in several stages",
            hint="cut the model elsewhere, or evaluate the unsplit model with the saved weights",
        )
    return named if named in common else min(common)
