"""The bound of perfect balance: what no plan beats, whatever its cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import link_of
from planner.cost.setting import Setting
from planner.cost.work import Work
from planner.formats.cluster import Cluster
from planner.formats.profile import KIND_COLUMNS, Profile
from planner.solver.bounds.registry import bounds_for

Least = Callable[[Work], Work]


def balanced_s(layer_costs: LayerCosts, setting: Setting, least: Least = lambda work: work) -> float:
    """Return a time per minibatch that no plan is below: all GPUs equally busy, and no communication.

    Where GPUs are of several kinds, each has a speed relative to the slowest for the whole model. A layer then takes at
    least the least over the kinds of its time on one, times the speed: with these times T · Σ speeds is enough for all
    layers in every plan, whichever kind runs which layer. (For any speeds: it is the dual of the linear program that
    divides layers freely.)

    Args:
        layer_costs: of the model.
        setting: what plans are priced for.
        least: turns the work of all layers, for one microbatch, into what no way to run them is below.
    """
    schedule, microbatches, cluster = setting.schedule, setting.microbatches, setting.cluster
    costs, speeds = _relaxed(layer_costs, cluster)
    everything = least(costs.everything)
    gpus, total, fastest = len(speeds), sum(speeds), max(speeds)
    once_s, update_s = (everything.forward_s + everything.backward_s).item(), everything.update_s.item()
    accumulate_s = everything.accumulate_s.item()
    if schedule.splits_backward:
        # The weights' part of a backward may wait, so the latency of one microbatch bounds nothing.
        return (microbatches * once_s + max(0, microbatches - gpus) * accumulate_s) / total
    # All microbatches of a minibatch accumulate gradients but the first of every GPU.
    accumulating_s = accumulate_s * max(0.0, microbatches / gpus - 1) * (gpus / total)
    if schedule.asynchronous:
        model = bounds_for(setting.cost_model, link_of(cluster), schedule, microbatches)
        return model.least_s(everything).item() / total + accumulating_s
    if not schedule.pipelined:
        return (once_s + update_s) / fastest
    return once_s * max(1 / fastest, microbatches / total) + accumulating_s


def _relaxed(layer_costs: LayerCosts, cluster: Cluster) -> tuple[LayerCosts, list[float]]:
    """Return the least times of layers over the kinds of devices, at speed 1, and the speed of each device."""
    if not cluster.kinds:
        return layer_costs, [1.0] * cluster.gpus
    on = [layer_costs.on(kind) for kind in cluster.kinds]
    seconds = [float(each.everything.compute_s) for each in on]
    speeds = [max(seconds) / own if own > 0 else 1.0 for own in seconds]
    each_gpu = [speed for kind, speed in zip(cluster.kinds, speeds, strict=True) for _ in range(kind.count)]
    return layer_costs.about(least_times(on, speeds)), each_gpu


def least_times(every: Sequence[LayerCosts], weights: Sequence[float]) -> Profile:
    """Return the profile whose layers take the least of their times in several profiles, each times its weight."""
    times = [name for name in KIND_COLUMNS if name.endswith("_s")]
    layers = (
        same[0].model_copy(
            update={name: min(getattr(each, name) * w for each, w in zip(same, weights, strict=True)) for name in times}
        )
        for same in zip(*(each.profile.layers for each in every), strict=True)
    )
    return every[0].profile.model_copy(update={"layers": tuple(layers), "kinds": None, "tensor": None})
