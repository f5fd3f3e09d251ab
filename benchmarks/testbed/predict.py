"""What the planner says of a plan with given stages: the cost model's time, and the simulator's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from benchmarks.testbed.fair import FairEngine
from planner.cluster import Cluster
from planner.cost import ASYNCHRONOUS, link_of, ring_all_reduce_s
from planner.plan_file import Plan, ScheduleName, SolverReport
from planner.pricing import Ledger, candidates, price
from planner.profile_file import Profile
from planner.simulator.pipeline import Outcome
from planner.simulator.plan import default_minibatches, simulate, stage_times
from planner.solver.assemble import assemble
from planner.solver.baselines import equal_time
from planner.solver.depth import price_with_depths

MINIBATCHES = 200  # of a simulated asynchronous run


def given_plan(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[int],
    replicas: Sequence[int],
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
) -> Plan:
    """The plan whose stages have so many layers and replicas, priced like any other."""
    ledger = Ledger(profile)
    ends = [0, *accumulate(stages)]
    assert ends[-1] == len(profile.layers)
    chosen = candidates([range(first, end) for first, end in pairwise(ends)], replicas)
    cost = price(ledger, chosen, cluster, schedule=schedule, microbatches=microbatches)
    if schedule in ASYNCHRONOUS:
        cost = price_with_depths(ledger, chosen, cluster, cost, "auto", schedule, microbatches)
    seconds = cost.seconds_per_minibatch
    report = SolverReport(
        name="given", cost_model="resource", status="feasible", lower_bound_s=0.0, gap=1.0, seconds=0.0
    )
    assert seconds > 0
    return assemble(ledger, cluster, chosen, cost, schedule, microbatches, report)


def balanced_stages(profile: Profile, count: int) -> list[int]:
    """Layers of each of `count` stages that compute about equally long."""
    return [len(stage.layers) for stage in equal_time(Ledger(profile), count)]


def simulated_s(plan: Plan) -> float:
    """Seconds per minibatch in the steady state of the simulated run."""
    last = len(plan.stages) - 1
    timeline = simulate(plan, _minibatches(plan))
    return _steady_s(plan, [e.end_s for e in timeline.events.rows() if e.kind == "backward" and e.stage == last])


def shared_links_s(plan: Plan) -> float:
    """The same where links are shared fairly, instead of in turns."""
    engine = FairEngine(plan, stage_times(plan), _minibatches(plan))
    finished = engine.run()
    assert finished
    return _steady_s(plan, engine.completions)


def _minibatches(plan: Plan) -> int:
    return MINIBATCHES if plan.schedule in ASYNCHRONOUS else default_minibatches(plan)


def _steady_s(plan: Plan, ends_s: Sequence[float]) -> float:
    """Seconds per minibatch in the middle of a run whose last stage ends its backwards at these times."""
    period = plan.microbatches if plan.microbatches > 1 else plan.stages[-1].replicas
    return Outcome(tuple(sorted(ends_s))).seconds_per_unit(period) * plan.microbatches


def data_parallel_s(profile: Profile, cluster: Cluster, bucket_bytes: float) -> float:
    """Seconds per round of DistributedDataParallel: its buckets go off one after the other while the backward runs.

    Layers hand in their gradients from the last to the first, and a bucket is full when it has `bucket_bytes` (Li et
    al. 2020, section 3.2.3). The cost model takes equal parts instead, because it knows no layers.
    """
    link = link_of(cluster)
    clock_s = sum(layer.forward_s for layer in profile.layers)
    reduced_s, waiting_bytes = clock_s, 0
    for layer in reversed(profile.layers):
        clock_s += layer.backward_s
        waiting_bytes += layer.gradient_bytes
        if waiting_bytes >= bucket_bytes:
            reduced_s = max(clock_s, reduced_s) + float(ring_all_reduce_s(waiting_bytes, cluster.gpus, link))
            waiting_bytes = 0
    reduced_s = max(clock_s, reduced_s) + float(ring_all_reduce_s(waiting_bytes, cluster.gpus, link))
    return reduced_s + sum(layer.update_s for layer in profile.layers)
