"""Compare time and memory of sharded and of recomputing stages with what is measured. See README.md
in this folder.

python -m benchmarks.stage_options --save
python -m benchmarks.stage_options --emulated --save
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.malloc import pages_returned
from benchmarks.testbed.bed import testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import emulate, fitting_scale
from benchmarks.testbed.measure import train_s
from planner.analysis.given_plan import price
from planner.api.running import profile as measure
from planner.executor.worker import launch
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.blocks import blocks_of
from planner.profiler.links.measure_cluster import measure_host
from planner.workers.job import Job

HERE = Path(__file__).parent
MODEL, README, RESULTS = (HERE / name for name in ("model.py", "README.md", "results.json"))
MARKER = "<!-- result -->"
BATCH_SIZE, MICROBATCHES = 16, 4
PROFILE_S = 10.0


@dataclass(frozen=True)
class Shape:
    """Stages of equally many blocks."""

    replicas: tuple[int, ...]
    schedule: str
    recompute: float = 0.0  # share of each stage's blocks that recompute, each by itself
    whole: bool = False  # each stage recomputes as one group
    # 1: the replicas divide the optimizer's state, 2: gradients, too, 3: weights, too
    level: int = 0
    masters: bool = False  # weights in bfloat16, with float32 masters

    def __str__(self) -> str:
        parts = ["-".join(map(str, self.replicas)), self.schedule]
        parts += [f"ZeRO-{self.level}"] * (self.level > 0) + ["whole stages recompute"] * self.whole
        parts += [f"{self.recompute:.0%} of the blocks recompute"] * (self.recompute > 0)
        return ", ".join(parts + ["master weights"] * self.masters)

    def plan(self, profile: Profile, cluster: Cluster) -> Plan:
        """Return the plan, priced and simulated."""
        blocks = len(blocks_of(profile)) // len(self.replicas)
        stages = [
            OwnStage(
                blocks=blocks,
                replicas=r,
                sharded=self.level > 0 and r > 1,
                sharding_level=max(1, self.level),
                recompute=self.whole or round(blocks * self.recompute) or False,
            )
            for r in self.replicas
        ]
        microbatches = 1 if self.schedule == "1f1b" else MICROBATCHES
        given = {"stages": stages, "schedule": self.schedule, "microbatches": microbatches}
        return price(profile, cluster, OwnPlan.model_validate(given))


SHAPES = (
    Shape((1, 1), "gpipe"),
    Shape((1, 1), "gpipe", 0.5),
    Shape((1, 1), "gpipe", 1.0),
    Shape((1, 1), "gpipe", whole=True),
    Shape((1, 1), "1f1b", 0.5),
    Shape((2,), "1f1b-flush", level=1),
    Shape((2,), "1f1b-flush", 0.5, level=1),
    Shape((2,), "1f1b-flush", level=2),
    Shape((2,), "1f1b-flush", level=3),
    Shape((1, 1), "1f1b-flush", masters=True),
    Shape((2,), "1f1b-flush", level=3, masters=True),
)
EMULATED = (
    Shape((1, 1, 1, 1), "1f1b-flush", 0.5),
    Shape((1, 1, 1, 1), "1f1b-flush", whole=True),
    Shape((2, 2), "1f1b-flush", level=1),
    Shape((2, 2), "1f1b-flush", 0.5, level=1),
    Shape((2, 2), "1f1b", level=1),
    Shape((2, 2), "1f1b", 0.5, level=1),
    Shape((4,), "1f1b-flush", level=1),
    Shape((4,), "1f1b-flush", level=2),
    Shape((4,), "1f1b-flush", level=3),
    Shape((4,), "1f1b-flush", 1.0, level=3),
)


def main() -> None:
    """Measure, print the table, and with --save write it into the README."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--emulated", action="store_true", help="four devices on the testbed, which needs root"
    )
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="of each run whose time is measured"
    )
    parser.add_argument("--plans", type=int, nargs="+", help="only these, by their row")
    parser.add_argument(
        "--save", action="store_true", help="write results.json, and the tables into the README"
    )
    arguments = parser.parse_args()
    kind = "emulated" if arguments.emulated else "measured"
    shapes: tuple[Shape, ...] = EMULATED if arguments.emulated else SHAPES
    if arguments.plans:
        shapes = tuple(shapes[row] for row in arguments.plans)
    load = os.getloadavg()[0]
    rows = []
    for row in (_emulated if arguments.emulated else _measured)(shapes, arguments.seconds):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "load": round(load, 1)}
    content = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    content[kind] = {"about": about, "rows": rows}
    print(_tables({kind: content[kind]}))
    if arguments.save:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        README.write_text(f"{head}{MARKER}\n\n{_tables(content)}\n", encoding="utf-8")


def _profile(*, masters: bool = False) -> Profile:
    return measure(
        MODEL,
        batch_size=BATCH_SIZE,
        device="cpu",
        seconds=PROFILE_S,
        processes=2,
        dtype="bfloat16" if masters else "float32",
        master_weights=masters,
    )


def _measured(shapes: Sequence[Shape], seconds: float) -> Iterator[dict[str, Any]]:
    """Train in two workers: for the times, and once more for the memory, where freed pages are
    given back.
    """
    cluster = measure_host(2, "cpu")
    profiles = {
        masters: _profile(masters=masters) for masters in {shape.masters for shape in shapes}
    }
    for shape in shapes:
        plan = shape.plan(profiles[shape.masters], cluster)
        predicted_s = plan.predicted.seconds_per_minibatch
        # Every unit in flight, and an update after each.
        least = 2 if plan.microbatches > 1 else 3 * plan.stages[0].in_flight
        timed = launch(
            Job(model=str(MODEL), plan=plan, steps=2 * least + round(seconds / predicted_s))
        )
        with pages_returned():
            peaks = launch(Job(model=str(MODEL), plan=plan, steps=least)).reports
        yield {
            "plan": str(shape),
            "predicted_s": predicted_s,
            "measured_s": timed.minibatch_size / timed.samples_per_s,
            "predicted_bytes": [stage.memory.total_bytes for stage in plan.stages],
            "measured_bytes": [
                max(report.peak_memory_bytes for report in peaks if report.stage == number)
                for number in range(len(plan.stages))
            ],
        }


def _emulated(shapes: Sequence[Shape], seconds: float) -> Iterator[dict[str, Any]]:
    """Train in four workers whose layers sleep for their times; forwards that run again sleep
    again.
    """
    profile, there = _profile(), flat_cluster(4, 1.25e8)
    scale = fitting_scale(profile, there)
    with tempfile.TemporaryDirectory(prefix="stage-options-") as folder, testbed(4) as bed:
        emulated = emulate(profile, scale, Path(folder))
        links = bed.links(scale.cluster(there), byte_factor=scale.byte_factor)
        for shape in shapes:
            with scaled_buckets(scale.byte_factor):
                plan = shape.plan(emulated.profile, links)
            measured_s = train_s(bed, emulated, plan, seconds)
            yield {
                "plan": str(shape),
                "predicted_s": plan.predicted.seconds_per_minibatch,
                "measured_s": measured_s,
            }


def _tables(content: dict[str, Any]) -> str:
    texts = []
    for kind in ("measured", "emulated"):  # other parts are of drawn cases
        if kind not in content:
            continue
        about, rows = content[kind]["about"], content[kind]["rows"]
        where = "two workers" if kind == "measured" else "four emulated devices"
        quiet = (
            ""
            if about["load"] < 1
            else f" Load average {about['load']} before it began, not quiet."
        )
        table = tabulate(
            [_cells(row) for row in rows],
            headers=(
                "plan",
                "predicted, s",
                "measured, s",
                "error",
                "memory, MB",
                "measured, MB",
                "error",
            ),
            tablefmt="github",
            disable_numparse=True,
        )
        texts.append(
            f"{where.capitalize()}, {about['date']}, torch {about['torch']}.{quiet}\n\n{table}"
        )
    return "\n\n".join(texts)


def _cells(row: dict[str, Any]) -> list[str]:
    predicted_s, measured_s = row["predicted_s"], row["measured_s"]
    cells = [
        row["plan"],
        f"{predicted_s:.3f}",
        f"{measured_s:.3f}",
        f"{predicted_s / measured_s - 1:+.1%}",
    ]
    pairs = list(zip(row.get("predicted_bytes", ()), row.get("measured_bytes", ()), strict=True))
    return [
        *cells,
        " ".join(f"{predicted / 1e6:.0f}" for predicted, _ in pairs),
        " ".join(f"{measured / 1e6:.0f}" for _, measured in pairs),
        " ".join(f"{predicted / measured - 1:+.1%}" for predicted, measured in pairs),
    ]


if __name__ == "__main__":
    main()
