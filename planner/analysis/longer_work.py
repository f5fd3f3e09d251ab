"""Layers that take longer than profiled on all devices alike: samples became longer.

    layer's seconds = its seconds before x seconds of its stage, measured / planned

A run measures workers, not layers. Where one of them is slow, its device is: its stage belongs on
another one, or must become smaller. Where all of them are, the work is, and it stays as slow on
another device. So all layers of a stage count as longer by the same factor then. A worker that is
far slower than the others beside that has a slow device, too: its layers became longer as those of
the others did.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from planner.analysis.measured_cluster import MeasuredCluster, WorkerSpeed
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.solver.tuning.answers import MeasuredTuning


def all_slower(found: MeasuredCluster, tuning: MeasuredTuning) -> bool:
    """Return whether all workers are so much slower that it is the work that became longer."""
    speeds = [worker.speed for worker in found.workers]
    return len(speeds) > 1 and max(speeds) < tuning.all_slower


def slow_devices(workers: Sequence[WorkerSpeed], tuning: MeasuredTuning) -> dict[int, float]:
    """Return the workers whose devices are slow, where the work became longer for all: by rank, the
    speed relative to the others'.
    """
    slowest = max(worker.speed for worker in workers) / tuning.most_uneven_work
    usual = median(worker.speed for worker in workers if worker.speed >= slowest)
    return {worker.rank: worker.speed / usual for worker in workers if worker.speed < slowest}


def longer_layers(
    plan: Plan, workers: Sequence[WorkerSpeed], before: Mapping[str, float]
) -> dict[str, float]:
    """Return how many times as long as profiled each layer takes, where the work became longer.

    Args:
        plan: that was run.
        workers: their speeds relative to the plan's.
        before: what the plan was solved for.
    """
    speeds = {worker.rank: worker.speed for worker in workers}
    longer: dict[str, float] = {}
    for stage in plan.stages:
        factor = fmean(1 / speeds[rank] for rank in stage.ranks)
        longer |= {name: factor * before.get(name, 1.0) for name in stage.layers}

    return longer


def profile_of_longer(profile: Profile, longer: Mapping[str, float]) -> Profile:
    """Return a profile whose layers take so many times as long, by name."""
    if not longer:
        return profile
    layers = tuple(_longer(layer, longer.get(layer.name, 1.0)) for layer in profile.layers)
    return replace(profile, layers=layers)


def _longer(layer: Layer, factor: float) -> Layer:
    return replace(layer, forward_s=factor * layer.forward_s, backward_s=factor * layer.backward_s)
