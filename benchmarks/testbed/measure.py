"""Run one plan on the testbed, and compare predicted with measured seconds per minibatch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.emulate import Emulated
from benchmarks.testbed.predict import given_plan
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.workers.job import Job

ROUNDS = 6  # of synchronous runs; the first does not count


@dataclass(frozen=True)
class Measured:
    """Seconds per minibatch of a run: predicted by simulation, and measured."""

    model: str
    cluster: str
    config: str
    schedule: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def run_plan(
    bed: Testbed, emulated: Emulated, plan: Plan, cluster_name: str, seconds: float
) -> Measured:
    """Train a plan for about `seconds` after the start-up, and compare with its prediction."""
    measured_s = train_s(bed, emulated, plan, seconds)
    return Measured(
        model=plan.model,
        cluster=cluster_name,
        config=plan.config,
        schedule=plan.schedule.name
        if plan.microbatches == 1
        else f"{plan.schedule} x{plan.microbatches}",
        predicted_s=plan.predicted.seconds_per_minibatch,
        measured_s=measured_s,
    )


def train_s(bed: Testbed, emulated: Emulated, plan: Plan, seconds: float) -> float:
    """Return the measured seconds per minibatch."""
    predicted_s = plan.predicted.seconds_per_minibatch
    period = math.lcm(*plan.replicas)
    if plan.microbatches > 1:
        steps = max(ROUNDS, math.ceil(seconds / predicted_s))
    else:
        # The executor excludes two pipeline depths per replica at the start and one at the end.
        first = plan.stages[0]
        steps = 4 * first.in_flight * first.replicas + max(
            2 * period, math.ceil(seconds / predicted_s)
        )
        steps = math.ceil(steps / period) * period
    return _measured_s(
        bed, emulated, Job(model=str(emulated.path), plan=plan, steps=steps), predicted_s
    )


def data_parallel_run(bed: Testbed, emulated: Emulated, links: Cluster, seconds: float) -> Measured:
    """Run data parallelism on all devices; each has minibatches of one microbatch in turn."""
    layers = len(emulated.profile.layers)
    plan = given_plan(emulated.profile, links, [layers], (links.gpus,))
    run = run_plan(bed, emulated, plan, described(links), seconds)
    return replace(run, schedule="data parallelism")


def _measured_s(bed: Testbed, emulated: Emulated, job: Job, predicted_s: float) -> float:
    assert job.steps is not None
    timeout_s = 120 + 4 * job.steps * predicted_s
    result = bed.train(job, job.plan.cluster, emulated.scale.byte_factor, timeout_s)
    # Completions come in bursts, so a window may have one more or less. The mean over stages varies
    # less.
    by_stage: defaultdict[int, float] = defaultdict(float)
    for report in result.reports:
        assert report.stage is not None  # no run here leaves out a worker
        # ranks that tell the same
        alike = 1 if job.plan.by_samples else job.plan.stages[report.stage].tensor
        by_stage[report.stage] += report.samples_per_s / alike
    return result.minibatch_size / mean(by_stage.values())


def described(cluster: Cluster) -> str:
    """Return a text of the measured links for a table."""
    sizes = "x".join(str(level.size) for level in cluster.levels)
    rates = ", ".join(f"{8 * level.bandwidth_bytes_per_s / 1e6:.0f}" for level in cluster.levels)
    return f"{sizes}, {rates} Mbps"
