"""How much of what another plan would gain is had, when devices or links become slower: simulated.

    python -m tests.campaigns.drift.decisions

Plans for four and eight devices are drawn by seed, and what happens to them. Windows of the run are
simulated on the true devices and links, with noise in each computation. The product's judge looks
at them, its correction and its solver answer, and the run moves where they say so. What is had is
compared with the best plan for the true devices and links, which nobody in the run knows.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import planner
from planner.analysis.measured_cluster import on_cluster
from planner.api.corrected import corrected
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.timeline import Event, Events, Timeline
from planner.simulator.drift import DriftJudge, Expectation, Window
from planner.simulator.simulate_plan import simulate
from tests.samples import layer, profile

_WINDOW = 10  # minibatches, all of which are simulated
_WINDOWS = 6
_SAME = 0.005  # relative seconds of two plans that are one
_NOISE = 0.1  # of a computation's time, at most
_WHATS = ("device", "link", "both", "nothing")


@dataclass(frozen=True)
class Case:
    """A plan, and what becomes of its devices and links."""

    what: str
    profile: Profile
    plan: Plan
    true: Cluster


@dataclass(frozen=True)
class Decision:
    """Seconds per minibatch on the true devices and links."""

    stays_s: float
    best_s: float
    had_s: float
    moved: bool
    windows: int  # until it was told; 0 where nothing was

    @property
    def possible(self) -> float:
        """Share by which the best plan is faster."""
        return self.stays_s / self.best_s - 1

    @property
    def share(self) -> float:
        """Share of the possible gain that is had."""
        return (self.stays_s - self.had_s) / (self.stays_s - self.best_s)


def drawn(seed: int) -> Case:
    """Draw a case; every fourth one is undisturbed."""
    chosen = random.Random(seed)
    what = _WHATS[seed % len(_WHATS)]
    devices = chosen.choice([4, 8])
    layers = [
        layer(
            f"l{number}",
            forward_s=(forward_s := chosen.uniform(0.5, 2.0)),
            backward_s=2 * forward_s,
            output_bytes=1000,
            weight_bytes=10_000_000,  # too many to exchange: stages are not replicated
            saved_bytes=5,
        )
        for number in range(4 * devices)
    ]
    model = profile(*layers)
    planned = flat_cluster(devices, 1e4)
    schedule = chosen.choice(["1f1b-flush", "1f1b"])
    microbatches = 4 * devices if schedule == "1f1b-flush" else None
    plan = planner.solve(
        model, planned, schedule=schedule, microbatches=microbatches, time_limit_s=10
    )
    return Case(what, model, plan, _disturbed(plan.cluster, what, chosen))


def _disturbed(cluster: Cluster, what: str, chosen: random.Random) -> Cluster:
    speeds = [1.0] * cluster.gpus
    if what in ("device", "both"):
        speeds[chosen.randrange(cluster.gpus)] = 1 / chosen.uniform(1.3, 3.0)
    rate = chosen.uniform(0.1, 0.5) if what in ("link", "both") else 1.0
    (level,) = cluster.levels
    kinds = tuple(DeviceKind(count=1, speed=speed) for speed in speeds)
    return replace(cluster, levels=(level.times_as_fast(rate),), kinds=kinds)


def run_on(case: Case, minibatches: int, seed: int) -> Timeline:
    """Simulate the plan of a case on its true devices and links, with noise."""
    stages = []
    for stage in case.plan.stages:
        speed = case.true.kind_of(stage.ranks[0]).speed
        stages.append(
            replace(stage, forward_s=stage.forward_s / speed, backward_s=stage.backward_s / speed)
        )
    run = simulate(replace(case.plan, cluster=case.true, stages=tuple(stages)), minibatches)
    noise = random.Random(seed)
    rows = [_noisy(event, noise) for event in run.events.rows()]
    return replace(run, source="measured", memory=(), links=(), events=Events.of(rows))


def _noisy(event: Event, noise: random.Random) -> Event:
    if event.lane != "compute":
        return event
    longer = 1 + noise.uniform(0, _NOISE)
    return event._replace(end_s=event.start_s + longer * (event.end_s - event.start_s))


def decided(case: Case, seed: int) -> Decision:
    """Let the product decide, and price what it does on the true devices and links."""
    stays_s = _seconds(case, case.plan)
    best = planner.solve(
        case.profile,
        case.true,
        schedule=case.plan.schedule.name,
        microbatches=case.plan.microbatches,
        time_limit_s=10,
    )
    best_s = min(stays_s, best.predicted.seconds_per_minibatch)
    for number, run in enumerate(_windows(case, seed), start=1):
        if run is None:
            continue
        better = corrected(case.profile, case.plan, run).better
        if better is None or better.workers != case.plan.workers:
            return Decision(stays_s, best_s, stays_s, False, number)
        return Decision(stays_s, best_s, _seconds(case, better), True, number)
    return Decision(stays_s, best_s, stays_s, False, 0)


def _windows(case: Case, seed: int) -> Iterator[Timeline | None]:
    """Yield for each window the run so far, where the judge says that it parts from the plan."""
    judge = DriftJudge(Expectation.of(case.plan))
    for number in range(_WINDOWS):
        run = run_on(case, _WINDOW, seed=100 * seed + number)
        window = Window(number * _WINDOW, (number + 1) * _WINDOW, list(run.events.rows()), 1.0)
        yield run if judge.look(window) is not None else None


def _seconds(case: Case, plan: Plan) -> float:
    there = on_cluster(case.profile, plan, case.true)
    return there.predicted.seconds_per_minibatch


def main() -> None:
    """Print what was decided in each case, and the mean share of the gain that was had."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    shares = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        case = drawn(seed)
        found = decided(case, seed)
        worth = found.possible >= 0.05
        if worth:
            shares.append(found.share)
        share = found.share if found.possible > _SAME else 0.0
        print(  # noqa: T201  (a program)
            f"{seed:4} {case.what:8} {case.plan.schedule!s:11} {case.plan.config:16} "
            f"possible {found.possible:6.1%}  {'moved' if found.moved else 'stayed':6} "
            f"after {found.windows} windows  had {share:6.1%}"
        )
    print(  # noqa: T201
        f"mean share of {len(shares)} gains of 5% or more: {fmean(shares):.1%}"
    )


if __name__ == "__main__":
    main()
