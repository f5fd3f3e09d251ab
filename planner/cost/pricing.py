"""Price plans: layer costs, stages and setting go in; time, bottleneck, memory and bytes sent come out.

A new cost model is a file in `planner.cost.models`, and a line in `COST_MODELS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.cost_model import CostModel, StageModel, UnpricedPlan
from planner.cost.models.interleaved import InterleavedModel
from planner.cost.models.published import PaperModel, PipedreamModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.cost.network.placement import Busy
from planner.cost.overheads import Price, stage_memory
from planner.cost.setting import Setting
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


def price(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Price:
    """Price a whole plan.

    With several chunks per worker, the number of stages is a multiple of them, and all stages have as many replicas.
    """
    plan, model, schedule = UnpricedPlan(layer_costs, stages, setting), cost_model_of(setting), setting.schedule
    time, held = model.time(plan), model.held(plan)
    memory = tuple(
        stage_memory(layer_costs.footprint(stage).divided(setting.microbatches), saved, schedule.versions(saved))
        for stage, saved in zip(stages, held.saved, strict=True)
    )
    workers = len(stages) // setting.chunks
    worker_of = tuple(schedule.worker_of(stage, workers) for stage in range(len(stages)))
    memory = with_overheads(layer_costs, stages, memory, worker_of)
    return Price(time.seconds, time.bottleneck, held.in_flight, memory, _sent_bytes(plan), worker_of)


def busy_resources(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Sequence[Busy]:
    """Return the busy seconds per minibatch of every resource of every stage.

    Under synchronous schedules these are its part of the maximum. With several chunks per worker there is one entry per
    worker, in the order of their first stages.
    """
    return cost_model_of(setting).time(UnpricedPlan(layer_costs, stages, setting)).busy


def _sent_bytes(plan: UnpricedPlan) -> float:
    """Count the bytes that all workers send for one minibatch: transfers both ways, and the stages' all-reduces.

    A ring of r workers moves 2(r-1)·W in all, once per round of r minibatches under 1f1b and naive, once per minibatch
    where that is divided. What ranks of one group send to each other does not count.
    """
    works, replicas, degrees = plan.works, plan.replicas, [stage.options.tensor for stage in plan.stages]
    transfers = sum(float(work.sent_bytes) * t for work, t in zip(works, degrees, strict=True))
    transfers *= plan.setting.microbatches
    rings = [2 * (r - 1) * t * float(each.trainable_bytes) for each, r, t in zip(works, replicas, degrees, strict=True)]
    if plan.setting.schedule.divides:
        return transfers + sum(rings)
    return transfers + sum(ring / r for ring, r in zip(rings, replicas, strict=True))
