"""The bounds of every cost model that the searches take, by its name and the schedule's formula."""

from __future__ import annotations

from planner.cost.network.link import Link
from planner.formats.cost_model_names import CostModelName
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule
from planner.solver.bounds.asynchronous import AsynchronousBounds
from planner.solver.bounds.bounds import Bounds
from planner.solver.bounds.double_buffered import DoubleBufferedBounds
from planner.solver.bounds.published import PaperBounds, PipedreamBounds

ASYNCHRONOUS: dict[CostModelName, type[Bounds]] = {
    "resource": AsynchronousBounds,
    "pipedream": PipedreamBounds,
    "paper": PaperBounds,
}


def bounds_for(name: CostModelName, link: Link, schedule: Schedule = ONE_F_ONE_B, microbatches: int = 1) -> Bounds:
    """Return the bounds of a cost model for an asynchronous schedule on devices with this link."""
    if schedule.formula == "double-buffered":
        return DoubleBufferedBounds(link, microbatches)
    return ASYNCHRONOUS[name](link)
