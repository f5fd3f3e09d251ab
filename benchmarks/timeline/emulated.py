"""Run four emulated devices over shaped links: messages, schedules and weight versions are real."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.bed import ROOT, Testbed
from benchmarks.testbed.buckets import scaled_buckets
from benchmarks.testbed.emulate import emulate, fitting_scale
from benchmarks.testbed.predict import balanced_stages, given_plan
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import load_profile
from planner.formats.timeline import Timeline
from planner.options.training import RunOptions
from planner.reporting.trace import load_run
from planner.units import parse_bandwidth
from planner.workers.job import Job

DEVICES = 4


@dataclass(frozen=True)
class EmulatedCase:
    """A run of an emulated profile in stages of equal time."""

    model: str
    bandwidth: str  # between the emulated devices
    replicas: tuple[int, ...]
    schedule: str
    microbatches: int = 1

    @property
    def kind(self) -> str:
        """Description in the table."""
        return f"emulated, {DEVICES} workers"

    @property
    def name(self) -> str:
        """Name in the table and on the command line."""
        config = "-".join(map(str, self.replicas))
        return f"{self.model} {config} {self.schedule}" + (
            f" x{self.microbatches}" if self.microbatches > 1 else ""
        )


def run_case(
    bed: Testbed, case: EmulatedCase, seconds: float, folder: Path
) -> tuple[Plan, Timeline]:
    """Shape and measure the links, plan, and train for about `seconds`, recording every
    minibatch.
    """
    profile = load_profile(ROOT / "profiles" / case.model / "cpu.json")
    there = flat_cluster(DEVICES, parse_bandwidth(case.bandwidth))
    scale = fitting_scale(profile, there)
    emulated = emulate(profile, scale, folder / case.name)
    links = bed.links(scale.cluster(there), byte_factor=scale.byte_factor)
    stages = balanced_stages(emulated.profile, len(case.replicas))
    with scaled_buckets(scale.byte_factor):
        plan = given_plan(
            emulated.profile, links, stages, case.replicas, case.schedule, case.microbatches
        )
    period = math.lcm(*case.replicas)
    steps = max(period, math.ceil(seconds / plan.predicted.seconds_per_minibatch / period) * period)
    trace = folder / f"{case.name}.trace.json"
    options = RunOptions(trace=str(trace), trace_minibatches=steps)
    job = Job(model=str(emulated.path), plan=plan, steps=steps, run_options=options)
    bed.train(job, links, scale.byte_factor, 60 + 4 * seconds)
    return plan, load_run(trace)
