"""Say once that BatchNorm sees microbatches: it normalises each by itself, as in GPipe, and one
process does not.
"""

import logging

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.units import counted

_log = logging.getLogger(__name__)
_PUBLISHED = "as in GPipe and PipeDream"


def warn_before_a_plan(model: nn.Module) -> None:
    """Say so where a plan may divide minibatches."""
    norms = _normalising(model)
    if norms:
        _log.warning(
            f"warning: BatchNorm ({_shown(norms)}) normalises each microbatch by itself, "
            f"{_PUBLISHED}, so a plan with "
            "several microbatches or replicas does not train as one process with whole "
            "minibatches does"
        )


def warn_of_division(model: nn.Module, parts: int) -> None:
    """Say so where a plan divides minibatches into so many parts."""
    norms = _normalising(model)
    if norms and parts > 1:
        # A worker's own handler begins the line with "warning: ".
        _log.warning(
            f"BatchNorm ({_shown(norms)}) normalises each of the {parts} parts of a minibatch by "
            f"itself, "
            f"{_PUBLISHED}, and one process normalises whole minibatches"
        )


def _normalising(model: nn.Module) -> list[str]:
    """Return the paths of BatchNorms that take the statistics of their batch."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


def _shown(paths: list[str]) -> str:
    if len(paths) == 1:
        return f"'{paths[0]}'"
    return counted(len(paths), "layer")
