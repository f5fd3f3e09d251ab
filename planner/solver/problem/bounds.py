"""Seconds that no plan of a problem is below: perfect balance, with all GPUs equally busy and no
communication.
"""

from collections.abc import Callable, Sequence
from functools import partial

from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import link_of
from planner.cost.setting import Setting
from planner.cost.work import Work
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.profile import KIND_COLUMNS, Layer, Profile
from planner.solver.problem.drained import drained_s
from planner.solver.problem.problem import Problem
from planner.solver.problem.replica_models import replica_model
from planner.solver.problem.states import Chain, CutSpace


def relaxed_s(problem: Problem, space: CutSpace | None = None) -> float:
    """Return seconds that no plan is below: perfect balance, no communication, the leanest ways.

    Under synchronous schedules the bound knows the bubble and the memory, too; it is infinite where
    no plan fits. Over a chain it holds for cuts along the profile's order, otherwise for all.
    """
    least = partial(problem.limits.least, profile=problem.layer_costs.profile)
    least_s = balanced_s(problem.layer_costs, problem.setting, least)

    schedule = problem.schedule
    drains = schedule.formula == "synchronous"
    if not drains or schedule.splits_backward or problem.cluster.kinds:
        return least_s
    return max(least_s, drained_s(problem, in_order=isinstance(space, Chain)))


def _as_it_is(work: Work) -> Work:
    return work


def balanced_s(
    layer_costs: LayerCosts,
    setting: Setting,
    least: Callable[[Work], Work] = _as_it_is,
) -> float:
    """Return a time per minibatch that no plan is below.

    Of m microbatches of c seconds each, forward and backward, N GPUs take at least

        c · max(1, m / N)   a schedule that drains, as the first microbatch passes all layers
        c · m / N           one that splits backwards: the weights' parts may wait, so that the
                            latency of one microbatch bounds nothing
        least_s / N         one that never drains: `Bounds.least_s`

    and the accumulation of gradients for all microbatches but the first of every GPU.

    Args:
        layer_costs: of the model.
        setting: whose GPUs may be of several kinds. Then N is the sum of their speeds: see
            `_on_kinds`.
        least: turns the work of all layers, for one microbatch, into what no way to run them is
            below.
    """
    schedule = setting.schedule
    microbatches = setting.microbatches
    gpus = setting.cluster.gpus

    speeds = [1.0] * gpus
    if setting.cluster.kinds:
        layer_costs, speeds = _on_kinds(layer_costs, setting.cluster)
    total_speed = sum(speeds)

    everything = least(layer_costs.everything)
    once_s = (everything.forward_s + everything.backward_s).item()
    accumulate_s = everything.accumulate_s.item()

    if schedule.splits_backward:
        accumulating_s = max(0, microbatches - gpus) * accumulate_s
        return (microbatches * once_s + accumulating_s) / total_speed

    later_share = max(0.0, microbatches / gpus - 1)
    accumulating_s = accumulate_s * later_share * (gpus / total_speed)
    if schedule.asynchronous:
        model = replica_model(link_of(setting.cluster), schedule, microbatches)
        return model.least_s(everything).item() / total_speed + accumulating_s

    return once_s * max(1 / max(speeds), microbatches / total_speed) + accumulating_s


def _on_kinds(layer_costs: LayerCosts, cluster: Cluster) -> tuple[LayerCosts, list[float]]:
    """Return the least costs of layers on GPUs of several kinds, and the speed of each GPU.

    Each GPU has a speed relative to the slowest for the whole model. A layer then takes at least
    the least over the kinds of its time on one, times the speed: with these times T · Σ speeds is
    enough for all layers in every plan. (For any speeds: it is the dual of the linear program that
    divides layers freely.)
    """
    on_kinds = [layer_costs.on_kind(kind) for kind in cluster.kinds]
    seconds = [float(costs.everything.compute_s) for costs in on_kinds]
    slowest_s = max(seconds)
    kind_speeds = [slowest_s / each_s if each_s > 0 else 1.0 for each_s in seconds]

    speeds: list[float] = []
    for kind, speed in zip(cluster.kinds, kind_speeds, strict=True):
        speeds += [speed] * kind.count
    return layer_costs.with_profile(least_times(on_kinds, kind_speeds)), speeds


def least_times(every: Sequence[LayerCosts], weights: Sequence[float]) -> Profile:
    """Return the profile whose layers take the least of their weighted times in several."""
    layers = zip(*(costs.profile.layers for costs in every), strict=True)
    return replace(
        every[0].profile,
        layers=tuple(_least_layer(variants, weights) for variants in layers),
        kinds=None,
        tensor=None,
    )


def _least_layer(variants: Sequence[Layer], weights: Sequence[float]) -> Layer:
    """Return a layer with the least of its weighted times."""
    pairs = list(zip(variants, weights, strict=True))
    times = {
        name: min(getattr(layer, name) * weight for layer, weight in pairs)
        for name in KIND_COLUMNS
        if name.endswith("_s")
    }
    return replace(variants[0], **times)
