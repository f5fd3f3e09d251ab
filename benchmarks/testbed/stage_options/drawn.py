"""Compare predictions with real runs of sharded stages, masters and sequence parallelism. See
README.md.

python -m benchmarks.testbed.stage_options.drawn --seed 1 --save
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.drawn_cases import Compared, compare
from planner.analysis.given_plan import price
from planner.api.running import profile as measure
from planner.errors import PlannerError, first_line
from planner.executor.worker import launch
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.blocks import blocks_of
from planner.profiler.links.measure_cluster import measure_host
from planner.profiler.this_machine import keep_freed_pages
from planner.reporting.tables.profile import disturbance_words
from planner.schedule.registry import find
from planner.workers.job import Job, TrainResult

KINDS, EACH = ("sharded", "masters", "sequence"), 4  # cases of each kind, one kind after the other
PROFILE_S, EXACT_STEPS = 8.0, 4
FLOPS = 4e9, 3e10  # of a microbatch of the whole model, forward and backward
HEADERS = (
    "model",
    "plan",
    "predicted, s",
    "measured, s",
    "error",
    "losses apart",
    "weights apart",
    "machine",
)
FORMATS = ("", "", ".3f", ".3f", "+.1%", ".0e", ".0e", "")
MODEL_FILE = '''\
"""Drawn by benchmarks.testbed.stage_options.drawn."""

from benchmarks.testbed.stage_options.model import {kind}

build_model, example_batch, dataset, loss, optimizer = {kind}({blocks}, {width}, {length})
'''


@dataclass(frozen=True)
class Case(Compared):
    """A model and a plan, and what became of it."""

    kind: str
    blocks: int
    width: int
    length: int
    samples: int  # of a microbatch
    microbatches: int
    schedule: str
    replicas: tuple[int, ...]
    level: int = 0
    tensor: int = 1
    recompute: bool = False
    losses_apart: float = 0.0  # from those of one process, the largest share
    # after some steps: the length of the difference by that of all steps
    weights_apart: float = 0.0
    disturbed: str = ""  # what the profile says of the machine

    @property
    def masters(self) -> bool:
        """Whether weights are in bfloat16, with masters in float32."""
        return self.kind == "masters"

    @property
    def words(self) -> list[str]:
        """The model, and the plan."""
        config = "1x2" if self.tensor > 1 else "-".join(map(str, self.replicas))
        parts = [
            config,
            f"{self.schedule} x{self.microbatches}" if self.microbatches > 1 else self.schedule,
        ]
        parts += [f"ZeRO-{self.level}"] * (self.level > 0) + ["master weights"] * self.masters
        parts += ["sequence parallel"] * (self.tensor > 1) + ["blocks recompute"] * self.recompute
        return [
            f"{self.blocks} blocks of {self.width}, {self.samples} x {self.length}",
            ", ".join(parts),
        ]

    def write_model(self, folder: Path) -> Path:
        """Write the model file, and return its path."""
        path = folder / "model.py"
        kind = "words" if self.tensor > 1 else "sized"
        path.write_text(
            MODEL_FILE.format(kind=kind, blocks=self.blocks, width=self.width, length=self.length)
        )
        return path

    def plan(self, profile: Profile, cluster: Cluster) -> Plan:
        """Return the plan, priced and simulated."""
        cut, size = len(blocks_of(profile)), len(self.replicas)
        counts = [cut * (number + 1) // size - cut * number // size for number in range(size)]
        stages = tuple(
            OwnStage(
                blocks=count,
                replicas=replicas,
                tensor=self.tensor,
                sharded=self.level > 0,
                sharding_level=max(1, self.level),
                recompute=count if self.recompute else False,
            )
            for count, replicas in zip(counts, self.replicas, strict=True)
        )
        schedule = find(self.schedule)
        own = OwnPlan(
            stages=stages,
            schedule=schedule,
            microbatches=self.microbatches if schedule.divides else None,
        )
        return price(
            profile, cluster.model_copy(update={"sequence_parallel": self.tensor > 1}), own
        )

    @property
    def alone(self) -> Case:
        """The same minibatches in one process."""
        return replace(self, replicas=(1,), level=0, tensor=1, recompute=False)


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    compare(
        __doc__,
        "testbed.stage_options.drawn",
        Case,
        draw=draw,
        words=lambda case: case.words,
        run=measured,
        table=table,
        cases=EACH * len(KINDS),
        seconds=10.0,
    )


def draw(seed: int, count: int) -> list[Case]:
    """Return so many random cases, the same for the same seed."""
    return [_case(random.Random(f"{seed}:{number}"), number) for number in range(count)]


def _case(choose: random.Random, number: int) -> Case:
    kind = KINDS[number // EACH % len(KINDS)]
    while True:
        blocks, width = choose.randint(3, 8), 64 * choose.randint(2, 8)
        length, samples = choose.choice((32, 64, 128)), choose.choice((4, 8, 16))
        if FLOPS[0] <= 6 * samples * length * blocks * (12 * width**2 + length * width) <= FLOPS[1]:
            break
    model = partial(Case, kind, blocks, width, length, samples)
    flush = choose.choice(("1f1b-flush", "gpipe")), choose.choice((2, 4, 8))
    match kind:
        case "sharded":
            return model(
                flush[1], flush[0], (2,), level=2 + number % 2, recompute=choose.random() < 0.25
            )
        case "masters":
            replicas = choose.choice(((2,), (1, 1)))
            if len(replicas) > 1 and choose.random() < 0.5:
                return model(1, "1f1b", replicas)
            level = choose.choice((0, 1, 2, 3)) if len(replicas) == 1 else 0
            return model(flush[1], flush[0], replicas, level=level)
        case _:
            schedule, microbatches = choose.choice((("1f1b", 1), flush))
            return model(microbatches, schedule, (1,), tensor=2)


def measured(
    cases: Sequence[Case], chosen: Sequence[int], seconds: float
) -> Iterator[tuple[int, Case]]:
    """Run the cases of these numbers."""
    keep_freed_pages()  # as the workers do
    cluster = measure_host(2, "cpu")
    for number in chosen:
        with tempfile.TemporaryDirectory(prefix="stage-options-") as folder:
            yield number, run(cases[number], cluster, seconds, Path(folder))


def run(case: Case, cluster: Cluster, seconds: float, folder: Path) -> Case:
    """Profile the model beside a second process, train the case's plan, and compare it with one
    process.
    """
    path = case.write_model(folder)
    try:
        profile = measure(
            path,
            batch_size=case.samples,
            device="cpu",
            seconds=PROFILE_S,
            processes=2,
            dtype="bfloat16" if case.masters else "float32",
            master_weights=case.masters,
            tensor=(case.tensor,) if case.tensor > 1 else (),
        )
        plan = case.plan(profile, cluster)
        predicted_s = plan.predicted.seconds_per_minibatch
        # Every unit in flight, and an update after each.
        least = 2 if plan.microbatches > 1 else 3 * plan.stages[0].in_flight
        result = launch(
            Job(model=str(path), plan=plan, steps=2 * least + round(seconds / predicted_s))
        )
        losses, weights = _apart(path, plan, case.alone.plan(profile, cluster), folder)
    except PlannerError as error:
        return replace(case, failure=first_line(error))
    measured_s = result.minibatch_size / result.samples_per_s
    return replace(
        case,
        predicted_s=predicted_s,
        measured_s=measured_s,
        losses_apart=losses,
        weights_apart=weights,
        disturbed=disturbance_words(profile) or "",
    )


def _apart(path: Path, plan: Plan, alone: Plan, folder: Path) -> tuple[float, float]:
    """Return how far losses and weights are from those of one process after a few steps."""
    results, weights = list[TrainResult](), list[dict[str, torch.Tensor]]()
    for number, (each, steps) in enumerate(((plan, EXACT_STEPS), (alone, EXACT_STEPS), (alone, 1))):
        saved = folder / f"{number}.pt"
        results.append(
            launch(Job(model=str(path), plan=each, steps=steps, seed=1, save_weights=str(saved)))
        )
        weights.append(torch.load(saved, weights_only=True))
    one, other = weights[:2]
    if found := [name for name, tensor in one.items() if tensor.dtype != other[name].dtype]:
        problem = (
            f"'{found[0]}' is {one[found[0]].dtype}, and {other[found[0]].dtype} in one process"
        )
        raise PlannerError(f"{problem}: {len(found)} of {len(one)} weights have another type")
    losses = [[entry.loss or 0.0 for entry in result.losses] for result in results]
    apart, moved = (
        sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
        for one, other in ((weights[0], weights[1]), (weights[1], weights[2]))
    )
    return max(abs(one / other - 1) for one, other in zip(*losses[:2], strict=True)), (
        apart / moved
    ) ** 0.5


def table(rows: Sequence[Case], about: str) -> str:
    """Return the rows in Markdown, and those that failed."""
    cells = [
        [
            *row.words,
            row.predicted_s,
            row.measured_s,
            row.error,
            row.losses_apart,
            row.weights_apart,
            row.disturbed,
        ]
        for row in rows
        if not row.failure
    ]
    failures = "".join(f"\n- {', '.join(row.words)}: {row.failure}" for row in rows if row.failure)
    table = tabulate(cells, headers=HEADERS, floatfmt=FORMATS, tablefmt="github")
    return f"{about}\n\n{table}{failures}"


if __name__ == "__main__":
    main()
