"""The bound of perfect balance: what no plan beats, whatever its cuts."""

from __future__ import annotations

from planner.cost.link import link_of
from planner.cost.setting import Setting
from planner.cost.work import Work
from planner.solver.bounds.registry import bounds_for


def balanced_s(everything: Work, setting: Setting) -> float:
    """Return a time per minibatch that no plan is below: all GPUs equally busy, and no communication.

    Args:
        everything: all layers as one stage, for one microbatch.
        setting: what plans are priced for.
    """
    schedule, microbatches, cluster = setting.schedule, setting.microbatches, setting.cluster
    speeds = [kind.speed for kind in cluster.kinds for _ in range(kind.count)] or [1.0] * cluster.gpus
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
