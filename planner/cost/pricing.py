"""Price plans: layer costs, stages and setting go in; time, bottleneck, memory and bytes sent come out."""

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.fully_sharded import fully_sharded
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.cost_model import CostModel, StageModel, UnpricedPlan
from planner.cost.models.interleaved import InterleavedModel
from planner.cost.models.published import PaperModel, PipedreamModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.cost.network.topology import Busy
from planner.cost.overheads import Price, gpu_bytes, stage_memory
from planner.cost.setting import Setting
from planner.errors import InputError
from planner.formats.names import CostModelName
from planner.formats.plan_parts import StageMemory
from planner.schedule.registry import SCHEDULES

ASYNCHRONOUS: dict[CostModelName, type[StageModel]] = {
    "resource": AsynchronousModel,
    "pipedream": PipedreamModel,
    "paper": PaperModel,
}


def cost_model_of(setting: Setting) -> CostModel:
    """Return the cost model for plans in this setting; raise InputError for a schedule that it does not describe."""
    name, schedule, link = setting.cost_model, setting.schedule, link_of(setting.cluster)
    if schedule.formula == "asynchronous":
        return ASYNCHRONOUS[name](link)
    if name != "resource":
        described = [each.name for each in SCHEDULES if each.formula == "asynchronous"]
        raise InputError(
            f"the cost model '{name}' describes the schedule {', '.join(described)}, not {schedule}",
            hint="use `cost_model=resource`",
        )
    match schedule.formula:
        case "double-buffered":
            return DoubleBufferedModel(link, setting.microbatches)
        case "synchronous":
            return SynchronousModel(link, schedule, setting.microbatches)
        case "chunked":
            return InterleavedModel(setting)


def price(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Price:
    if stages[0].options.level > 1:
        (stage,) = stages
        less = replace(stage, options=replace(stage.options, level=1))
        return fully_sharded(layer_costs, stage, setting, price(layer_costs, [less], setting))
    plan, model = UnpricedPlan(layer_costs, stages, setting), cost_model_of(setting)
    time, worker_of = model.time(plan), tuple(setting.workers_of(len(stages)))
    in_flight, memory = _held(plan, model, worker_of)
    return Price(time.seconds, time.bottleneck, in_flight, memory, _sent_bytes(plan), worker_of)


def holds(
    layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the units in flight and the bytes of each stage's GPU, as in the plan's price, which takes longer."""
    if stages[0].options.level > 1:
        whole = price(layer_costs, stages, setting)
        return whole.in_flight, whole.gpu_bytes
    worker_of = tuple(setting.workers_of(len(stages)))
    in_flight, memory = _held(UnpricedPlan(layer_costs, stages, setting), cost_model_of(setting), worker_of)
    return in_flight, gpu_bytes(memory, worker_of)


def _held(
    plan: UnpricedPlan, model: CostModel, worker_of: Sequence[int]
) -> tuple[tuple[int, ...], tuple[StageMemory, ...]]:
    """Return the units in flight and the memory of each stage."""
    held, layer_costs, setting = model.held(plan), plan.layer_costs, plan.setting
    memory = tuple(
        stage_memory(
            layer_costs.footprint(stage).divided(setting.microbatches), saved, setting.schedule.versions(saved)
        )
        for stage, saved in zip(plan.stages, held.saved, strict=True)
    )
    return held.in_flight, with_overheads(layer_costs, plan.stages, memory, worker_of)


def busy_resources(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Sequence[Busy]:
    return cost_model_of(setting).time(UnpricedPlan(layer_costs, stages, setting)).busy


def _sent_bytes(plan: UnpricedPlan) -> float:
    sent, rings = 0.0, 0.0
    for work, stage in zip(plan.works, plan.stages, strict=True):
        r, degree = stage.replicas, stage.options.tensor
        sent += float(work.sent_bytes) * degree
        # A ring moves 2(r-1)·W in all, once per minibatch that is divided, otherwise once per round of r minibatches.
        ring = 2 * (r - 1) * degree * float(work.trainable_bytes)
        rings += ring if plan.setting.schedule.divides else ring / r
    return sent * plan.setting.microbatches + rings
