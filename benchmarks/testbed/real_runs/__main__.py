"""Compare predictions with real runs of two workers on this machine, of cases that nobody chose.
See README.md.

python -m benchmarks.testbed.real_runs --seed 1 --save
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from tabulate import tabulate

from benchmarks.drawn_cases import Compared, compare
from benchmarks.kept import ROOT
from planner.analysis.given_plan import price
from planner.api.running import profile as measure
from planner.errors import PlannerError, first_line
from planner.executor.worker import launch
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.profiler.links.measure_cluster import measure_host
from planner.profiler.this_machine import keep_freed_pages
from planner.reporting.tables.profile import disturbance_words
from planner.schedule.registry import SCHEDULES, find
from planner.workers.job import Job

HEADERS = ("model", "plan", "predicted, s", "measured, s", "error", "of computing", "machine")
FORMATS = ("", "", ".3f", ".3f", "+.1%", "+.1%", "")
# Samples of a microbatch with which a step of the whole model takes a tenth of a second to one.
SIZES = {
    "alexnet": (4, 8),
    "inception_v3": (1, 2),
    "lstm_lm": (8, 16, 32),
    "resnet50": (8, 16),
    "s2vt": (1, 2, 4),
    "unet": (1,),
    "vgg16": (8, 16, 32),
}
PROFILE_S = 6.0


@dataclass(frozen=True)
class Case:
    """Two stages, or two replicas of one."""

    model: str
    size: int  # samples of a microbatch
    schedule: str
    microbatches: int
    cut: float  # share of the step that the first stage has; 0 for two replicas
    sharded: bool
    recompute: tuple[bool, bool]  # by stage

    def __str__(self) -> str:
        config = f"1-1 cut at {self.cut:.0%}" if self.cut else "2, sharded" if self.sharded else "2"
        divided = f" x{self.microbatches}" if self.microbatches > 1 else ""
        again = ", ".join(
            f"stage {number} recomputes" for number, on in enumerate(self.recompute) if on
        )
        return f"{config}, {self.schedule}{divided} of {self.size}" + (
            f", {again}" if again else ""
        )

    def plan(self, profile: Profile, cluster: Cluster) -> Plan:
        """Return the case's plan, priced and simulated."""
        names = [layer.name for layer in profile.layers]
        done = list(accumulate(layer.forward_s + layer.backward_s for layer in profile.layers))
        first = min(
            range(1, len(names)), key=lambda count: abs(done[count - 1] / done[-1] - self.cut)
        )
        parts = [names[:first], names[first:]] if self.cut else [names]
        stages = [
            OwnStage(
                layers=tuple(part),
                replicas=2 // len(parts),
                sharded=self.sharded and profile.may_shard_optimizer,
                recompute=again,
            )
            for part, again in zip(parts, self.recompute, strict=False)
        ]
        return price(
            profile,
            cluster,
            OwnPlan(
                stages=tuple(stages), schedule=find(self.schedule), microbatches=self.microbatches
            ),
        )


@dataclass(frozen=True)
class Row(Compared):
    """A case and what became of it."""

    model: str
    plan: str
    predicted_busy_s: float = 0.0  # of the worker that computes longest by the plan
    measured_busy_s: float = 0.0  # of the same worker
    disturbed: str = ""  # what the profile says of the machine

    @property
    def computing_error(self) -> float:
        """Relative error of the time that a worker computes."""
        return self.predicted_busy_s / self.measured_busy_s - 1


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    compare(
        __doc__,
        "testbed.real_runs",
        Row,
        draw=draw,
        words=lambda case: (case.model, case),
        run=measured,
        table=_table,
        cases=20,
        seconds=10.0,
    )


def draw(seed: int, count: int) -> list[Case]:
    """Return so many random cases, the same for the same seed."""
    return [_case(random.Random(f"{seed}:{number}")) for number in range(count)]


def _case(choose: random.Random) -> Case:
    model = choose.choice(list(SIZES))
    replicated = choose.random() < 1 / 3
    schedules = [each for each in SCHEDULES if not each.chunked]
    schedule = choose.choice(schedules)
    return Case(
        model=model,
        size=choose.choice(SIZES[model]),
        schedule=schedule.name,
        microbatches=choose.choice((2, 4, 8)) if schedule.divides else 1,
        cut=0.0 if replicated else choose.uniform(0.35, 0.65),
        sharded=replicated and choose.random() < 0.5,
        recompute=(choose.random() < 0.25, choose.random() < 0.25 and not replicated),
    )


def measured(
    cases: Sequence[Case], chosen: Sequence[int], seconds: float
) -> Iterator[tuple[int, Row]]:
    """Run the cases of these numbers."""
    keep_freed_pages()  # as the workers do
    cluster = measure_host(2, "cpu")
    for number in chosen:
        yield number, run(cases[number], cluster, seconds)


def run(case: Case, cluster: Cluster, seconds: float) -> Row:
    """Profile the model beside a second process, then train the case's plan."""
    model = ROOT / "profiles" / case.model / "model.py"
    try:
        profile = measure(model, batch_size=case.size, device="cpu", seconds=PROFILE_S, processes=2)
        plan = case.plan(profile, cluster)
        predicted_s = plan.predicted.seconds_per_minibatch
        # Every unit in flight, and an update after each.
        least = 2 if plan.microbatches > 1 else 3 * plan.stages[0].in_flight
        result = launch(
            Job(model=str(model), plan=plan, steps=2 * least + round(seconds / predicted_s))
        )
    except PlannerError as error:
        return Row(case.model, str(case), failure=first_line(error))
    measured_s = result.minibatch_size / result.samples_per_s
    busiest = max(result.reports, key=lambda report: _computing_s(plan, report.rank))
    return Row(
        model=case.model,
        plan=str(case),
        predicted_s=predicted_s,
        measured_s=measured_s,
        predicted_busy_s=_computing_s(plan, busiest.rank),
        measured_busy_s=busiest.busy_share * measured_s,
        disturbed=disturbance_words(profile) or "",
    )


def _computing_s(plan: Plan, rank: int) -> float:
    """Sum the seconds per minibatch in which a worker's stages compute."""
    return sum(
        stage.tensor
        * (
            plan.microbatches * (stage.compute_s - stage.update_s)
            + stage.update_s * (stage.replicas if plan.schedule.divides else 1)
            + stage.accumulate_s * max(0, plan.microbatches - stage.replicas)
        )
        / stage.replicas
        for stage in plan.stages
        if rank in stage.ranks
    )


def _table(rows: Sequence[Row], about: str) -> str:
    ran = [row for row in rows if not row.failure]
    cells = [
        [
            row.model,
            row.plan,
            row.predicted_s,
            row.measured_s,
            row.error,
            row.computing_error,
            row.disturbed,
        ]
        for row in ran
    ]
    table = tabulate(cells, headers=HEADERS, floatfmt=FORMATS, tablefmt="github")
    failures = "".join(f"\n- {row.model}, {row.plan}: {row.failure}" for row in rows if row.failure)
    return f"{about}\n\n{table}\n\n{summary([row.error for row in ran])}\n{failures}"


def summary(errors: Sequence[float]) -> str:
    """Return how large relative errors are."""
    sizes = sorted(abs(error) for error in errors)
    within = sum(size <= 0.05 for size in sizes)
    return (
        f"{within} of {len(sizes)} within 5%; median {median(sizes):.1%}, worst {sizes[-1]:.1%}"
        if sizes
        else ""
    )


if __name__ == "__main__":
    main()
