"""Let simulated runs decide whether to move to another plan, in cases that nobody chose.

    python -m benchmarks.testbed.replan.decisions --save

Plans for four and eight devices are drawn by seed, and what happens to the devices and links, and
when. Windows of the run are simulated on the true devices and links, with noise in each
computation. The product's judge looks at them, its correction and its solver answer, and its
replanner decides. What is had is compared with the best plan for the true devices and links, which
nobody in the run knows.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from unittest import mock

from tabulate import tabulate
from torch.distributed import HashStore  # type: ignore[attr-defined]  # by a star import

import planner
from benchmarks.kept import Results
from benchmarks.solver_quality.drawn_chain import chain, layer
from planner.analysis.measured_cluster import on_cluster
from planner.api.corrected import corrected
from planner.executor.run.replan import Replanner
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster
from planner.formats.drift import Corrected, Drift, plan_words
from planner.formats.files import replace, write_text
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.formats.timeline import Event, Events, Timeline
from planner.options.training import DriftOptions
from planner.plan.left_out import left_out
from planner.simulator.drift import LOOKS, DriftJudge, Expectation, Parting, Window
from planner.simulator.simulate_plan import simulate
from planner.workers.job import Job

FOLDER = Path(__file__).parent
WINDOW = 10  # minibatches, all of which are simulated
HALF = WINDOW // LOOKS
QUIET = 4  # windows before the disturbance
WINDOWS = 12  # of a run without recovery
RECOVERS = 12  # windows after the disturbance, in cases that recover
MINIBATCHES = 10_000  # of the run, so that every move pays
COST = 5  # minibatches that a move takes
NOISE = 0.1  # of a computation's time, at most
BURST = 0.3  # share of the windows in which another process takes a worker's core for a while
WHATS = ("device", "link", "both", "recovers", "lengths")
SAME = 0.05  # share by which a plan must be faster to be another one
CASES = 40
UNDISTURBED = 20


@dataclass(frozen=True)
class World:
    """True devices, links and lengths, relative to those that were planned for."""

    speeds: tuple[float, ...]
    rate: float = 1.0
    layers: tuple[float, ...] = ()  # times as long; () where lengths are as planned
    bytes_: float = 1.0  # times as many in messages


@dataclass(frozen=True)
class Case:
    """A plan, and what becomes of its devices, links and lengths."""

    what: str
    profile: Profile
    plan: Plan
    world: World
    moment: float  # windows from the start of the run
    bursts: bool = False


@dataclass(frozen=True)
class Phase:
    """Part of a run in which devices and links stay as they are: seconds per minibatch."""

    stays_s: float  # of the plan that it begins with
    best_s: float
    had_s: float  # of the plan that it ends with
    after: float  # windows until the run moved; 0 where it did not

    @property
    def possible(self) -> float:
        """Share by which the best plan is faster."""
        return self.stays_s / self.best_s - 1

    @property
    def share(self) -> float:
        """Share of the possible gain that is had."""
        return (self.stays_s - self.had_s) / (self.stays_s - self.best_s)


@dataclass
class Run:
    """A run while it is simulated."""

    case: Case
    seed: int
    plan: Plan
    moves: list[tuple[int, Plan]] = field(default_factory=list)  # minibatch, plan
    told: int = 0
    # What it is in each world, as long as the plan stays.
    there: dict[World, Plan] = field(default_factory=dict)

    def on(self, world: World) -> Plan:
        """Return the run's plan as it runs in a world."""
        if world not in self.there:
            self.there[world] = on_world(self.case, self.plan, world)
        return self.there[world]


# Drawing


def drawn(seed: int, *, disturbed: bool = True) -> Case:
    """Draw a case."""
    choose = random.Random(f"{seed} {disturbed}")
    what = WHATS[seed % len(WHATS)] if disturbed else "nothing"
    devices = 4 if seed // len(WHATS) % 2 == 0 else 8
    layers = [
        layer(
            f"l{number}",
            choose.uniform(0.5, 2.0),
            round(10 ** choose.uniform(3.0, 4.5)),  # so that cuts differ on slow links
            10_000_000,  # too many to exchange: stages are not replicated
            saved_bytes=5,
        )
        for number in range(4 * devices)
    ]
    model = chain(layers, "benchmarks.testbed.replan")
    schedule = choose.choice(["1f1b-flush", "1f1b"])
    microbatches = 2 * devices if schedule == "1f1b-flush" else None
    plan = planner.solve(
        model,
        flat_cluster(devices, 1e4),
        schedule=schedule,
        microbatches=microbatches,
        time_limit_s=10,
    )
    world = _world(what, devices, len(layers), choose)
    moment = QUIET + choose.random()
    return Case(what, model, plan, world, moment, bursts=not disturbed)


def _world(what: str, devices: int, layers: int, choose: random.Random) -> World:
    speeds = [1.0] * devices
    if what in ("device", "both", "recovers"):
        speeds[choose.randrange(devices)] = 1 / choose.uniform(1.3, 3.0)
    rate = 1.0
    if what in ("link", "both"):
        rate = choose.uniform(0.1, 0.5)
    if what != "lengths":
        return World(tuple(speeds), rate)

    # Attention's share of a layer grows with the square of the length.
    longer = choose.uniform(1.3, 2.0)
    shares = [choose.uniform(0.0, 0.5) for _ in range(layers)]
    factors = tuple((1 - share) * longer + share * longer**2 for share in shares)
    return World(tuple(speeds), layers=factors, bytes_=longer)


# The true world


def true_profile(case: Case, world: World) -> Profile:
    """Return the profile of a case with the lengths of a world."""
    if not world.layers:
        return case.profile
    pairs = zip(case.profile.layers, world.layers, strict=True)
    return replace(case.profile, layers=tuple(_longer(each, factor) for each, factor in pairs))


def _longer(each: Layer, factor: float) -> Layer:
    return replace(each, forward_s=factor * each.forward_s, backward_s=factor * each.backward_s)


def true_cluster(case: Case, world: World) -> Cluster:
    """Return the cluster of a case with the devices and links of a world."""
    cluster = flat_cluster(case.plan.cluster.gpus, 1e4)
    (level,) = cluster.levels
    kinds = tuple(DeviceKind(count=1, speed=speed) for speed in world.speeds)
    rate = world.rate / world.bytes_
    return replace(cluster, levels=(level.times_as_fast(rate),), kinds=kinds)


def on_world(case: Case, plan: Plan, world: World) -> Plan:
    """Return a plan as it runs in a world, priced and simulated."""
    profile = true_profile(case, world)
    there = replace(plan, profile_digest=profile.digest)
    return on_cluster(profile, there, true_cluster(case, world))


def best_s(case: Case, world: World, stays_s: float) -> float:
    """Return the seconds per minibatch of the best plan for a world."""
    best = planner.solve(
        true_profile(case, world),
        true_cluster(case, world),
        schedule=case.plan.schedule.name,
        microbatches=case.plan.microbatches,
        time_limit_s=10,
    )
    return min(stays_s, best.predicted.seconds_per_minibatch)


def _size(plan: Plan) -> int:
    assert plan.minibatch_size is not None
    return plan.minibatch_size


# A run


def quiet(case: Case) -> World:
    """Return the world that was planned for."""
    return World((1.0,) * case.plan.cluster.gpus)


def phases(case: Case, seed: int) -> tuple[list[Phase], Run]:
    """Let the product decide, and price what it does on the true devices and links."""
    run = Run(case, seed, case.plan)
    end = WINDOWS * WINDOW
    changes = [(round(case.moment * WINDOW), case.world)]
    if case.what == "recovers":
        back = changes[0][0] + RECOVERS * WINDOW
        changes.append((back, quiet(case)))
        end = back + WINDOWS * WINDOW
    if case.what == "nothing":
        changes = []
        end = 2 * WINDOWS * WINDOW

    _simulate(run, changes, end)
    starts = changes or [(0, quiet(case))]
    ends = [start for start, _ in starts[1:]] + [end]
    plan = case.plan
    found = []
    for (start, world), until in zip(starts, ends, strict=True):
        own = [(at, to) for at, to in run.moves if start < at <= until]
        stays_s = on_world(case, plan, world).predicted.seconds_per_minibatch
        least_s = best_s(case, world, stays_s)
        after = (own[0][0] - start) / WINDOW if own else 0.0
        if own:
            plan = own[-1][1]
        had_s = on_world(case, plan, world).predicted.seconds_per_minibatch
        found.append(Phase(stays_s, min(least_s, had_s), had_s, after))
    return found, run


def _simulate(run: Run, changes: Sequence[tuple[int, World]], end: int) -> None:
    """Go through the windows of a run; note the moves."""
    now = [0.0]
    options = DriftOptions(replan=True, profile="profile.json", drift_window=WINDOW)
    job = Job(model="model.py", plan=run.plan, drift=options)
    with mock.patch("planner.executor.run.replan.time.monotonic", side_effect=lambda: now[0]):
        replanner = Replanner(job, 0, MINIBATCHES, HashStore())
        cost_s = COST * run.plan.predicted.seconds_per_minibatch
        replanner.expect_cost(cost_s)
        judge = DriftJudge(Expectation.of(run.plan), share=1 / LOOKS)
        at = 0
        windows: list[Window] = []
        while at < end:
            until = (at // HALF + 1) * HALF
            window = _window(run, changes, at, until)
            windows = [*windows[1 - 2 * LOOKS :], window]
            now[0] += (until - at) * _size(run.plan) / window.samples_per_s
            # While it is decided, the workers go on to the next point.
            passed = (until // replanner.every + 1) * replanner.every
            for point in replanner.points(at, passed + 1):
                replanner.ends_at(point)
            at = until
            parting = judge.look(window)
            if parting is not None:
                run.told += 1
                drift, answer = _answer(run, windows, parting, replanner.longer)
                replanner.consider(drift, answer, clear=parting.clear)
            replanner.look(until, window.samples_per_s)
            point = passed + replanner.every
            if replanner.ends_at(point):
                run.plan = replanner.next_plan()
                run.there.clear()
                run.moves.append((point, run.plan))
                replanner.moved(run.plan, point, cost_s)
                judge = DriftJudge(Expectation.of(run.plan), share=1 / LOOKS)
                windows = []
                at = point


def _window(run: Run, changes: Sequence[tuple[int, World]], first: int, end: int) -> Window:
    """Simulate the minibatches of half a window, in which the world may change."""
    noise = random.Random(f"{run.seed} {first}")
    events: list[Event] = []
    begin_s = 0.0
    took_s = 0.0  # as in the middle of a run: what is simulated fills and drains the pipeline
    for start, until, world in _parts(run.case, changes, first, end):
        there = run.on(world)
        rows = [
            event
            for event in simulate(there, end - first).events.rows()
            if start <= event.minibatch + first < until
        ]
        begin_s -= min((row.start_s for row in rows), default=0.0)
        moved = [
            row._replace(
                minibatch=row.minibatch + first,
                start_s=row.start_s + begin_s,
                end_s=row.end_s + begin_s,
            )
            for row in rows
        ]
        events += moved
        begin_s = max(row.end_s for row in moved)
        steady_s = there.predicted.seconds_per_minibatch
        took_s += (until - start) * steady_s * (1 + noise.uniform(0, NOISE))
    number = first // WINDOW
    bursts = [_burst(run, number - 1), _burst(run, number)]
    noisy = [_noisy(event, noise, bursts) for event in events]
    samples = (end - first) * _size(run.plan)
    return Window(first, end, noisy, samples / took_s, _left_out(run, changes, noise, end))


def _left_out(
    run: Run, changes: Sequence[tuple[int, World]], noise: random.Random, end: int
) -> dict[int, float]:
    """Return what workers without stages measure at the end of half a window."""
    world = [world for start, world in [(0, quiet(run.case)), *changes] if start < end][-1]
    ratios = {}
    for rank in left_out(run.plan, run.case.plan.cluster.gpus):
        planned = 1.0
        if run.plan.cluster.kinds:
            planned = run.plan.cluster.kind_of(rank).speed
        ratios[rank] = planned / world.speeds[rank] * (1 + noise.uniform(0, NOISE))
    return ratios


def _parts(
    case: Case, changes: Sequence[tuple[int, World]], first: int, end: int
) -> Iterator[tuple[int, int, World]]:
    edges = [(0, quiet(case)), *changes]
    for number, (start, world) in enumerate(edges):
        until = edges[number + 1][0] if number + 1 < len(edges) else MINIBATCHES
        if max(start, first) < min(until, end):
            yield max(start, first), min(until, end), world


class Burst(NamedTuple):
    """Minibatches for which another process takes a worker's core."""

    rank: int
    start: int
    end: int
    slower: float


def _burst(run: Run, number: int) -> Burst:
    """Return what happens in a window of a run; it may go on in the next one."""
    drawn_from = random.Random(f"{run.seed} burst {number}")
    rank = drawn_from.randrange(run.case.plan.cluster.gpus)
    start = number * WINDOW + drawn_from.randrange(WINDOW)
    slower = drawn_from.uniform(1.2, 2.5)
    if not run.case.bursts or drawn_from.random() > BURST:
        return Burst(0, 0, 0, 1.0)
    return Burst(rank, start, start + HALF, slower)


def _noisy(event: Event, noise: random.Random, bursts: Sequence[Burst]) -> Event:
    if event.lane != "compute":
        return event
    longer = 1 + noise.uniform(0, NOISE)
    for burst in bursts:
        if event.rank == burst.rank and burst.start <= event.minibatch < burst.end:
            longer *= burst.slower
    return event._replace(end_s=event.start_s + longer * (event.end_s - event.start_s))


def _answer(
    run: Run, windows: Sequence[Window], parting: Parting, longer: Mapping[str, float]
) -> tuple[Drift, Corrected]:
    """Solve again, as the process beside a run does."""
    events = [event for window in windows for event in window.events]
    since = [event for event in events if event.minibatch >= parting.since]
    end = windows[-1].end
    timeline = Timeline.of_plan(run.plan, "measured", end, Events.of(since))
    answer = corrected(
        run.case.profile, run.plan, timeline, longer=longer, left_out=windows[-1].left_out
    )
    size = _size(run.plan)
    better_s = answer.expected_s
    if answer.better is not None:
        better_s = answer.better.predicted.seconds_per_minibatch
    drift = Drift(
        since=parting.since,
        seen=end,
        config=plan_words(run.plan),
        planned_samples_per_s=size / run.plan.predicted.seconds_per_minibatch,
        measured_samples_per_s=windows[-1].samples_per_s,
        expected_samples_per_s=size / answer.expected_s,
        better_samples_per_s=size / better_s,
    )
    return drift, answer


# The table


@dataclass(frozen=True)
class Row:
    """What was decided in a case; lists have one value for each phase."""

    seed: int
    what: str
    devices: int
    schedule: str
    possible: list[float]  # share by which the best plan is faster
    had: list[float]  # share of that
    after: list[float]  # windows until the run moved; 0 where it did not
    told: int  # differences that were solved for
    moves: int


def row(seed: int, *, disturbed: bool) -> Row:
    """Decide a case."""
    case = drawn(seed, disturbed=disturbed)
    found, run = phases(case, seed)
    return Row(
        seed=seed,
        what=case.what,
        devices=case.plan.cluster.gpus,
        schedule=case.plan.schedule.name,
        possible=[phase.possible for phase in found],
        had=[phase.share if phase.possible >= SAME else 0.0 for phase in found],
        after=[phase.after for phase in found],
        told=run.told,
        moves=len(run.moves),
    )


def _cells(each: Row) -> list[object]:
    return [
        each.seed,
        each.what,
        each.devices,
        each.schedule,
        ", then ".join(f"{possible:.0%}" for possible in each.possible),
        ", then ".join(f"{after:.1f}" if after else "-" for after in each.after),
        ", then ".join(
            f"{had:.1%}" if possible >= SAME else "-"
            for had, possible in zip(each.had, each.possible, strict=True)
        ),
        each.told,
    ]


HEADERS = ("seed", "what", "devices", "schedule", "possible", "moved after", "had", "told")


def summary_of(disturbed: Sequence[Row], undisturbed: Sequence[Row]) -> str:
    """Return what all cases show, and their table."""
    found = [
        each for row in disturbed for each in zip(row.possible, row.had, row.after, strict=True)
    ]
    worth = [(had, after) for possible, had, after in found if possible >= SAME]
    rest = [after for possible, _, after in found if possible < SAME]
    moved = [after for _, after in worth if after]
    lines = [
        f"Simulated: {len(disturbed)} disturbed runs; in {len(worth)} of their {len(found)} phases "
        f"another plan would be {SAME:.0%} faster or more.",
        "",
        f"- gain that is had, mean of these: {fmean(had for had, _ in worth):.1%}",
        f"- moved in {len(moved)} of them, after {fmean(moved):.2f} windows in the mean and "
        f"{max(moved):.1f} at most",
        f"- moves where no plan is {SAME:.0%} faster: {sum(map(bool, rest))} of {len(rest)} phases",
        f"- moves of {len(undisturbed)} undisturbed runs on busy devices: "
        f"{sum(row.moves for row in undisturbed)}",
    ]
    cells = [_cells(each) for each in (*disturbed, *undisturbed)]
    table = tabulate(cells, headers=HEADERS, tablefmt="github")
    return "\n".join(lines) + f"\n\n{table}"


def main() -> None:
    """Print what was decided in each case, and the mean share of the gain that was had."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--undisturbed", type=int, default=UNDISTURBED)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    results = Results(FOLDER, save=arguments.save, name="decisions.json")
    first = arguments.first_seed

    def rows(count: int, *, disturbed: bool) -> Iterator[tuple[str, Row]]:
        for seed in range(first, first + count):
            yield str(seed), row(seed, disturbed=disturbed)

    found = results.measured("disturbed", Row, rows(arguments.cases, disturbed=True))
    busy = results.measured("undisturbed", Row, rows(arguments.undisturbed, disturbed=False))
    text = summary_of(*([*part.values()] for part in (found, busy)))
    print(text)
    if arguments.save:
        write_text(FOLDER / "decisions.md", text + "\n")


if __name__ == "__main__":
    main()
