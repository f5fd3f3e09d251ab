"""Say where a model fixes its number of samples, and what that means for training on its
dataset.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner.model.capture.failure import calling_place
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec
from planner.units import counted

_log = logging.getLogger(__name__)


@contextmanager
def noting_pins() -> Iterator[list[str]]:
    """Yield a list that gets the lines of the user's at which the tracer takes one number for a
    size of the batch.
    """
    places: list[str] = []
    # Private; the tracer tells nobody else when it does so.
    replace = ShapeEnv._set_replacement

    def noted(env: ShapeEnv, symbol: sympy.Symbol, target: sympy.Expr, *args: Any) -> None:
        if target.is_Integer and not env.is_unbacked_symint(symbol):
            place = calling_place()
            if place is not None:
                places.append(place)
        replace(env, symbol, target, *args)

    with mock.patch.object(ShapeEnv, "_set_replacement", noted):
        yield places


def only_size(graph: LayerGraph) -> str:
    """Return the sentence for a model that takes one number of samples only."""
    assert graph.batch_size is not None
    place = ""
    if graph.pinned_at is not None:
        place = f", since {graph.pinned_at} fixes that number"
    return f"the model takes microbatches of {counted(graph.batch_size, 'sample')} only{place}"


def warn_of_only_size(graph: LayerGraph, spec: TrainingSpec) -> None:
    """Say while there is time that an epoch's smaller last minibatch will be refused."""
    if graph.batch_size is None or graph.blocks is not None or not spec.defines("dataset"):
        return
    _log.warning(
        f"warning: {only_size(graph)}: an epoch whose last minibatch is smaller will be refused; "
        f"hint: in forward and "
        "loss() take x.shape[0] in place of len(x), int(x.shape[0]) or the example's own number; "
        "or train with "
        "`drop_last`"
    )
