"""What a plan is predicted to reach, beside one GPU and data parallelism."""

from __future__ import annotations

import numpy as np

from planner.cost.buckets import ready_s, reduced_s
from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.link import backward_and_reduce_s, link_of, ring_all_reduce_s
from planner.cost.models.registry import asynchronous_model
from planner.cost.price import Price
from planner.cost.pricing import price as price_of
from planner.cost.setting import Setting
from planner.cost.stage_options import StageOptions
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.plan import Prediction, SolverReport
from planner.formats.profile import Profile
from planner.schedule.schedule import Schedule
from planner.solver.candidates.trials import simulated_price


def predict(
    layer_costs: LayerCosts, cluster: Cluster, price: Price, schedule: Schedule, microbatches: int, report: SolverReport
) -> Prediction:
    """Compared, per microbatch, with one GPU and with all GPUs data parallel, under the same cost model.

    One GPU trains one microbatch per step. Neither needs to fit the memory. Where devices differ, one GPU is the
    profiled one.
    """
    size = layer_costs.profile.microbatch_size
    everything = _everything(layer_costs)
    one_gpu_s = float(layer_costs.work(everything).compute_s)
    if schedule.divides:
        parallel_s, parallel_bytes = _data_parallel_divided(layer_costs, cluster, price, schedule, microbatches)
    else:
        parallel_s, parallel_bytes = _data_parallel(layer_costs, cluster, price, report)
    seconds = price.seconds_per_minibatch
    samples = None if size is None else size * microbatches
    return Prediction(
        seconds_per_minibatch=seconds,
        by="cost model" if price.cost_model_s is None else "simulation",
        samples_per_s=None if samples is None else samples / seconds,
        bottleneck=price.bottleneck,
        speedup_over_one_gpu=one_gpu_s * microbatches / seconds,
        speedup_over_data_parallel=parallel_s * microbatches / seconds,
        communication_bytes_per_sample=None if samples is None else price.communication_bytes / samples,
        data_parallel_communication_bytes_per_sample=None if size is None else parallel_bytes / size,
        communication_cut=(
            1 - price.communication_bytes / microbatches / parallel_bytes if parallel_bytes > 0 else None
        ),
    )


def _everything(layer_costs: LayerCosts, replicas: int = 1, kind: DeviceKind | None = None) -> Candidate:
    return Candidate(frozenset(), frozenset(range(len(layer_costs.profile.layers))), StageOptions(replicas, kind=kind))


def _data_parallel(
    layer_costs: LayerCosts, cluster: Cluster, price: Price, report: SolverReport
) -> tuple[float, float]:
    """Seconds and bytes per minibatch of all GPUs data parallel, each with one minibatch per step, as under 1f1b.

    With buckets that are as late as in a simulation, that is what its simulation says, too: nothing shares the links
    with its all-reduce. Where devices differ, it waits for the slowest.
    """
    everything = layer_costs.work(_everything(layer_costs))
    model = asynchronous_model(report.cost_model, link_of(cluster))
    slowest = min((kind.speed for kind in cluster.kinds), default=1.0)
    seconds = float(model.stage_s(everything.at_speed(slowest), np.float64(cluster.gpus)))
    if price.cost_model_s is not None:
        seconds += _late_buckets_s(layer_costs.profile, cluster, slowest) / cluster.gpus
    return seconds, 2 * (cluster.gpus - 1) / cluster.gpus * float(everything.trainable_bytes)


def _data_parallel_divided(
    layer_costs: LayerCosts, cluster: Cluster, price: Price, schedule: Schedule, microbatches: int
) -> tuple[float, float]:
    """Seconds and bytes per microbatch of all GPUs data parallel, with as many microbatches per step as the plan.

    With fewer per minibatch than GPUs, it has one per GPU: the others would have nothing to do.
    """
    slowest = min(cluster.kinds, key=lambda kind: kind.speed, default=None)
    stages = [_everything(layer_costs, cluster.gpus, slowest)]
    how = schedule.unchunked  # one stage has no chunks
    most = max(microbatches, cluster.gpus)
    cost = price_of(layer_costs, stages, Setting(cluster, how, most))
    if price.cost_model_s is not None:
        cost = simulated_price(layer_costs, stages, cluster, cost, "auto", how, most)
    return cost.seconds_per_minibatch / most, cost.communication_bytes / most


def _late_buckets_s(profile: Profile, cluster: Cluster, speed: float) -> float:
    """How much later than by the formula all gradients are summed that all devices reduce."""
    link = link_of(cluster)
    if not link.overlap or cluster.gpus == 1:
        return 0.0
    parts_s = [seconds / speed for seconds in ready_s(profile.layers)]
    trained_bytes = sum(layer.gradient_bytes for layer in profile.layers)
    reduce_s = float(ring_all_reduce_s(trained_bytes, cluster.gpus, link))
    return reduced_s(parts_s, reduce_s) - float(backward_and_reduce_s(parts_s[-1], reduce_s, link))
