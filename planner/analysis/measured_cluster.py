"""The cluster as a run measured it: how fast each worker's device is, and how fast the links are.

    speed of a worker = planned seconds of its computations / measured seconds of them
    rate of a level   = planned rate x planned seconds of its messages / measured seconds of them

What is planned is the simulation of the minibatches that the run recorded. Both are medians over
single computations and messages, because a pause of the host is no property of a device or a link.
A level has several routes, one between any two workers that exchange messages, and the rate of the
middle one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.analysis.compare_runs import check_same_run
from planner.analysis.given_plan import GivenPlan, priced_plan
from planner.cost.network.topology import Topology
from planner.errors import InputError
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.formats.files import Record, replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.timeline import Event, Timeline
from planner.simulator.measured_ratios import (
    Transfer,
    of_units,
    route_ratios,
    transfers,
    weighted_median,
)
from planner.simulator.simulate_plan import simulate_recorded
from planner.solver.clock import Clock
from planner.solver.tuning.answers import MeasuredTuning
from planner.solver.tuning.record import STANDARD


class WorkerSpeed(Record):
    """The speed of a worker's device relative to what the plan expects of it."""

    rank: int
    speed: float


class LevelRate(Record):
    """Rates of the links of one level, counted from 0 for the innermost, in bytes per second."""

    level: int
    planned_bytes_per_s: float
    measured_bytes_per_s: float | None  # None where no message tells it


class MeasuredCluster(Record):
    """A cluster with the speeds and rates that a run measured, and what was measured."""

    cluster: Cluster
    workers: tuple[WorkerSpeed, ...]
    links: tuple[LevelRate, ...]


def measured_cluster(
    plan: Plan,
    run: Timeline,
    tuning: MeasuredTuning = STANDARD.measured,
    left_out: Mapping[int, float] = MappingProxyType({}),
) -> MeasuredCluster:
    """Return the plan's cluster as a run found it: `planner.measured_cluster` says how.

    Args:
        plan: that was run.
        run: what it measured.
        tuning: what counts as another device or link.
        left_out: seconds of the workers that the plan leaves out, by rank, relative to its own.
    """
    planned = simulate_recorded(plan, run)
    check_same_run(planned, run)

    workers = _speeds(planned, run, tuning.fewest)
    links = _rates(plan.cluster, planned, run, tuning.fewest)
    levels = _corrected_levels(plan.cluster, links, tuning.same_rate)
    speeds = {worker.rank: worker.speed for worker in workers}
    speeds |= {rank: 1 / ratio for rank, ratio in left_out.items()}
    kinds = kinds_of_speeds(plan.cluster, speeds, tuning)
    cluster = replace(plan.cluster, levels=levels, kinds=kinds)
    return MeasuredCluster(cluster=cluster, workers=workers, links=links)


def on_cluster(profile: Profile, plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan as it would run on other devices or links, priced and simulated.

    Args:
        profile: the profile that the plan was solved from.
        plan: its stages keep their workers.
        cluster: as many devices as the plan's.

    Raises:
        PlanError: for another profile.
    """
    given = GivenPlan.of(profile, replace(plan, cluster=cluster), Clock())
    return priced_plan(given.request, given.stages)


# Speeds of devices


def _speeds(planned: Timeline, run: Timeline, fewest: int) -> tuple[WorkerSpeed, ...]:
    expected = {
        _key(event): event.end_s - event.start_s for event in of_units(planned.events.rows())
    }
    ratios: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in of_units(run.events.rows()):
        planned_s = expected.get(_key(event), 0.0)
        measured_s = event.end_s - event.start_s
        if planned_s > 0 and measured_s > 0:
            ratios[event.rank].append((planned_s / measured_s, planned_s))

    for rank in run.workers:
        if len(ratios[rank]) < fewest:
            raise InputError(
                f"the run recorded {len(ratios[rank])} computations of worker {rank}, too few to "
                f"tell its speed",
                hint=f"record at least {fewest} minibatches with `trace` and `trace_minibatches`",
            )

    return tuple(
        WorkerSpeed(rank=rank, speed=round(weighted_median(ratios[rank]), 3))
        for rank in run.workers
    )


def _key(event: Event) -> tuple[int, str, int, int, int]:
    return event.rank, event.kind, event.stage, event.minibatch, event.microbatch


def kinds_of_speeds(
    cluster: Cluster, speeds: Mapping[int, float], tuning: MeasuredTuning
) -> tuple[DeviceKind, ...]:
    """Return a cluster's kinds of devices, where some are not as fast as planned.

    Args:
        cluster: as planned.
        speeds: of devices relative to that, by rank; those of others are as planned.
        tuning: which differences count.
    """
    same = tuning.same_speed
    if not speeds:
        return cluster.kinds
    kinds: list[DeviceKind] = []
    for rank in range(cluster.gpus):
        if cluster.kinds:
            usual = cluster.kind_of(rank)
        else:
            usual = DeviceKind(count=1)

        speed = speeds.get(rank, 1.0)  # a device that nobody measured is as it was
        if abs(speed - 1) <= same:
            speed = 1.0
        kind = replace(usual, count=1, speed=usual.speed * speed)

        last = kinds[-1] if kinds else None
        if last is not None and _alike(last, kind, same):
            kinds[-1] = replace(last, count=last.count + 1)
        else:
            kinds.append(kind)

    nothing_new = not cluster.kinds and all(kind.speed == 1 for kind in kinds)
    return () if nothing_new else tuple(kinds)


def _alike(one: DeviceKind, other: DeviceKind, same: float) -> bool:
    """Return whether two devices are of one kind, and about as fast."""
    same_kind = (one.name, one.device, one.memory_bytes, one.link_ratios) == (
        other.name,
        other.device,
        other.memory_bytes,
        other.link_ratios,
    )
    return same_kind and abs(one.speed / other.speed - 1) <= same


# Rates of links


def _rates(
    cluster: Cluster, planned: Timeline, run: Timeline, fewest: int
) -> tuple[LevelRate, ...]:
    topology = Topology(cluster)
    expected_s = dict(transfers(planned.events.rows(), waited=False))
    found: defaultdict[int, list[Transfer]] = defaultdict(list)
    for message, measured_s in transfers(run.events.rows(), waited=True):
        number = int(topology.level(message.sender, message.receiver))
        planned_s = expected_s.get(message, 0.0)
        # A message of hardly more than its latency tells nothing of the rate.
        if planned_s > 2 * topology.link(number).latency_s:
            found[number].append(Transfer(message, planned_s, measured_s))

    rates = []
    for number, level in enumerate(cluster.joined):
        measured = None
        if len(found[number]) >= fewest:
            routes = route_ratios(found[number]).values()
            ratio = weighted_median((route.ratio, route.messages) for route in routes)
            measured = level.bandwidth_bytes_per_s * ratio
        rates.append(
            LevelRate(
                level=number,
                planned_bytes_per_s=level.bandwidth_bytes_per_s,
                measured_bytes_per_s=measured,
            )
        )

    return tuple(rates)


def _corrected_levels(
    cluster: Cluster, rates: Sequence[LevelRate], same: float
) -> tuple[Level, ...]:
    """Return the cluster's levels with the rates that differ from the planned ones."""
    joined = iter(rates)
    levels = []
    for level in cluster.levels:
        rate = next(joined, None) if level in cluster.joined else None
        if rate is None or rate.measured_bytes_per_s is None:
            levels.append(level)
            continue
        factor = rate.measured_bytes_per_s / rate.planned_bytes_per_s
        levels.append(level if _about_one(factor, same) else level.times_as_fast(factor))

    return tuple(levels)


def _about_one(factor: float, same: float) -> bool:
    return 1 / (1 + same) <= factor <= 1 + same
