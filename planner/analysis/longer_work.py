"""Layers that take longer than profiled on all devices alike: samples became longer.

    layer's seconds = profiled seconds x seconds of its stage, measured / profiled

A run measures workers, not layers. Where one of them is slow, its device is: its stage belongs on
another one, or must become smaller. Where all of them are, the work is, and it stays as slow on
another device. So all layers of a stage count as longer by the same factor then.
"""

from collections.abc import Sequence
from statistics import fmean

from planner.analysis.measured_cluster import MeasuredCluster, WorkerSpeed, on_cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.solver.tuning.answers import MeasuredTuning


def measured_work(
    profile: Profile, plan: Plan, found: MeasuredCluster, tuning: MeasuredTuning
) -> tuple[Profile, MeasuredCluster]:
    """Return the profile and the cluster as a run measured them: one of both is as it was.

    Args:
        profile: that the plan was solved from; the plan may have been solved from what an earlier
            call made of it.
        plan: that was run.
        found: what was measured, as if all of it were due to devices.
        tuning: what counts as another speed.
    """
    factors = _of_plan(profile, plan)
    if _all_slower(found.workers, tuning):
        factors = [
            factor * longer
            for factor, longer in zip(factors, _of_run(plan, found.workers), strict=True)
        ]
        cluster = replace(found.cluster, kinds=plan.cluster.kinds)
        found = replace(found, cluster=cluster)
    if all(abs(factor - 1) <= tuning.same_speed for factor in factors):
        return profile, found

    by_layer = {
        name: factor
        for stage, factor in zip(plan.stages, factors, strict=True)
        for name in stage.layers
    }
    layers = tuple(_longer(layer, by_layer.get(layer.name, 1.0)) for layer in profile.layers)
    return replace(profile, layers=layers), found


def _all_slower(workers: Sequence[WorkerSpeed], tuning: MeasuredTuning) -> bool:
    return len(workers) > 1 and all(worker.speed < tuning.all_slower for worker in workers)


def _of_plan(profile: Profile, plan: Plan) -> list[float]:
    """Return by how much the layers of each stage were longer when the plan was solved."""
    profiled = on_cluster(profile, plan, plan.cluster)
    factors = []
    for stage, usual in zip(plan.stages, profiled.stages, strict=True):
        before_s = usual.forward_s + usual.backward_s
        factors.append((stage.forward_s + stage.backward_s) / before_s if before_s > 0 else 1.0)
    return factors


def _of_run(plan: Plan, workers: Sequence[WorkerSpeed]) -> list[float]:
    """Return by how much the layers of each stage take longer than the plan expects."""
    speeds = {worker.rank: worker.speed for worker in workers}
    return [fmean(1 / speeds[rank] for rank in stage.ranks) for stage in plan.stages]


def _longer(layer: Layer, factor: float) -> Layer:
    return replace(
        layer, forward_s=factor * layer.forward_s, backward_s=factor * layer.backward_s
    )
