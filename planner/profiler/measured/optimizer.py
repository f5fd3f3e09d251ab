"""Try the user's optimizer and scheduler before anything is measured: what no plan could train is
refused here.
"""

import logging
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from planner.model.optimizer_part import check_scheduler, trained_parameters
from planner.model.separable import halves, schedule_problem, separability
from planner.model.spec import TrainingSpec
from planner.profiler.step.counters import fake_group

_log = logging.getLogger(__name__)


def try_optimizer(spec: TrainingSpec, model: nn.Module, device: torch.device) -> bool | None:
    """Return whether stages may each step their part of the parameters; None where nothing is
    trained.

    It is tried as in a worker among others, so that an optimizer that communicates there does so
    here.

    Raises:
        ModelFileError: when the optimizer communicates or fails, or when stages cannot follow the
            scheduler.
    """
    whole = trained_parameters(model)
    if not whole:
        return None
    check_scheduler(spec, whole)
    ways = halves([each.name for each in whole])
    with nullcontext() if dist.is_initialized() else fake_group(2):
        tried = separability(spec, whole, ways, device)
        separable = tried.problem is None or (tried.claimed and not tried.combines)
        problem = None
        if separable:
            problem = schedule_problem(spec, whole, ways, device)

    if separable and problem is None:
        return True
    if problem is not None:
        _log.warning(
            f"scheduler() {problem}: `plan solve` makes plans of one stage alone; hint: let it "
            f"follow the number of "
            "steps alone"
        )
        return False

    _log.warning(
        f"{tried.kind} {tried.problem}: `plan solve` makes plans of one stage alone; hint: with "
        f"an optimizer that "
        "updates each parameter by itself, such as AdamW, there are others; a norm of all "
        "gradients is "
        "`clip_grad_norm` of `plan train`"
    )
    return False
