"""All cost models, by the schedule's formula and the cost model's name. A new one is a file here, and a line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.cost_model import CostModel, StageModel
from planner.cost.models.interleaved import InterleavedModel
from planner.cost.models.published import PaperModel, PipedreamModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.errors import InputError
from planner.formats.names import CostModelName
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Formula

if TYPE_CHECKING:
    from planner.cost.setting import Setting

ASYNCHRONOUS: dict[CostModelName, type[StageModel]] = {
    "resource": AsynchronousModel,
    "pipedream": PipedreamModel,
    "paper": PaperModel,
}
COST_MODELS: dict[tuple[Formula, CostModelName], type[CostModel]] = {
    **{("asynchronous", name): model for name, model in ASYNCHRONOUS.items()},
    ("double-buffered", "resource"): DoubleBufferedModel,
    ("synchronous", "resource"): SynchronousModel,
    ("chunked", "resource"): InterleavedModel,
}


def cost_model_of(setting: Setting) -> CostModel:
    """Return the cost model for plans in this setting; raise InputError for a schedule that it does not describe."""
    name, schedule = setting.cost_model, setting.schedule
    if (schedule.formula, name) not in COST_MODELS:
        described = [each.name for each in SCHEDULES if (each.formula, name) in COST_MODELS]
        raise InputError(
            f"the cost model '{name}' describes the schedule {', '.join(described)}, not {schedule}",
            hint="use `cost_model=resource`",
        )
    return COST_MODELS[schedule.formula, name].of(setting)


def asynchronous_model(name: CostModelName, link: Link) -> StageModel:
    """Return the cost model of that name for 1f1b."""
    return ASYNCHRONOUS[name](link)
