"""Price plans: layer costs, stages and setting go in; time, bottleneck, memory and bytes sent come
out.
"""

from collections.abc import Sequence

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.fully_sharded import fully_sharded
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.cost_model import CostModel, UnpricedPlan
from planner.cost.models.interleaved import InterleavedModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.cost.network.topology import Busy
from planner.cost.overheads import Price, stage_memory
from planner.cost.setting import Setting
from planner.formats.files import replace


def cost_model_of(setting: Setting) -> CostModel:
    """Return the cost model of the setting's schedule."""
    schedule = setting.schedule
    link = link_of(setting.cluster)
    match schedule.formula:
        case "asynchronous":
            return AsynchronousModel(link)
        case "double-buffered":
            return DoubleBufferedModel(link, setting.microbatches)
        case "synchronous":
            return SynchronousModel(link, schedule, setting.microbatches)
        case "chunked":
            return InterleavedModel(setting)
        case None:  # its simulation says how long a plan takes, and this what stages hold
            if schedule.chunked:
                return InterleavedModel(setting)
            if schedule.asynchronous:
                return AsynchronousModel(link)
            return SynchronousModel(link, schedule, setting.microbatches)


def price(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> Price:
    """Return the price of stages: time, bottleneck, memory and bytes sent."""
    if stages[0].options.shards_gradients:
        (stage,) = stages
        alone = stage.options.sharding.of_optimizer_alone()
        less = replace(stage, options=stage.options.with_sharding(alone))
        return fully_sharded(layer_costs, stage, setting, price(layer_costs, [less], setting))

    plan = UnpricedPlan(layer_costs, stages, setting)
    model = cost_model_of(setting)
    schedule = setting.schedule
    time = model.time(plan)
    held = model.held(plan)
    memory = tuple(
        stage_memory(
            layer_costs.footprint(stage).divided(setting.microbatches),
            saved,
            schedule.versions(saved),
        )
        for stage, saved in zip(stages, held.saved, strict=True)
    )
    worker_of = tuple(setting.workers_of(len(stages)))
    memory = with_overheads(layer_costs, stages, memory, worker_of)
    return Price(
        time.seconds, time.bottleneck, held.in_flight, memory, _sent_bytes(plan), worker_of
    )


def busy_resources(
    layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting
) -> Sequence[Busy]:
    """Return the busy seconds of each stage's resources."""
    return cost_model_of(setting).time(UnpricedPlan(layer_costs, stages, setting)).busy


def _sent_bytes(plan: UnpricedPlan) -> float:
    """Return the bytes that all devices send per minibatch."""
    messages = 0.0
    rings = 0.0
    for work, stage in zip(plan.works, plan.stages, strict=True):
        r = stage.replicas
        degree = stage.options.ranks_per_replica
        messages += float(work.sent_bytes) * degree

        # A ring moves 2(r-1)·W in all, once per minibatch that is divided, otherwise once per round
        # of r minibatches.
        ring = 2 * (r - 1) * degree * float(work.trainable_bytes)
        if not plan.setting.schedule.divides:
            ring /= r
        rings += ring

    return messages * plan.setting.microbatches + rings
