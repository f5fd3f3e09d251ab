"""The chosen plan beside what one would do without a planner, on the same cluster and by the same cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.analysis.question import MICROBATCHES_PER_GPU, Question, question_of, stages_of
from planner.cost.layer_costs import Candidate, Ledger
from planner.cost.plan_price import Price
from planner.cost.pricing import price
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.plan import Plan, ScheduleName, config_of
from planner.formats.profile import Profile
from planner.solver.reference import baselines

CHOSEN = "chosen plan"
DATA_PARALLEL = "data parallel"


class Row(Record):
    """One way to train the model on the cluster. Times and bytes are per microbatch, which all rows have in common."""

    name: str
    config: str
    schedule: ScheduleName
    microbatches: int  # per minibatch
    workers: int
    seconds_per_microbatch: float
    samples_per_s: float | None  # None when the profile does not know its batch size
    speedup_over_data_parallel: float
    memory_bytes: int  # of the worker that needs most
    over_memory_bytes: int  # by which that does not fit; 0 where it does
    communication_bytes: float  # sent by all workers, per microbatch
    communication_bytes_per_sample: float | None
    communication_cut: float | None  # share of data parallel's bytes that is not sent; None where that sends none
    idle_share: float  # of the workers' time: bubbles, waits, and communication that computation does not hide


class Comparison(Record):
    """The chosen plan first, then the baselines."""

    model: str
    cluster: Cluster
    rows: tuple[Row, ...]


def compare(
    profile: Profile, cluster: Cluster | None = None, *, plan: Plan | None = None, question: Question | None = None
) -> Comparison:
    """The plan for `cluster`, or `plan`, beside data parallelism, hand-made pipelines, and GPipe on the same cut.

    Args:
        profile: costs per layer.
        cluster: solved for, when there is no plan.
        plan: made from this profile; it brings its cluster and schedule.
        question: how to solve; the default is `solve`'s.

    Raises:
        PlanError: when the plan was made from another profile.
        InfeasibleError, InputError: as `solve`.
    """
    if plan is None:
        assert cluster is not None, "either a plan or a cluster"
        question = question or Question()
        plan = question.solve(profile, cluster)
    else:
        question = question_of(plan)
    ledger, cluster = Ledger(profile), plan.cluster
    chosen, asked = stages_of(ledger, plan), question
    if plan.schedule == "interleaved":  # whose chunks these cuts do not have
        question = replace(question, schedule="1f1b-flush")
    equal_time = baselines.equal_time(ledger, cluster.gpus)
    straight = question.fastest(ledger, [*baselines.straight(ledger, cluster), equal_time], cluster)
    table: list[tuple[str, Sequence[Candidate], Question]] = [
        (DATA_PARALLEL, baselines.data_parallel(ledger, cluster.gpus), question),
        ("straight pipeline", straight, question),
        ("equal layers", baselines.equal_layers(ledger, cluster.gpus), question),
        ("equal parameters", baselines.equal_parameters(ledger, cluster.gpus), question),
        ("equal time", equal_time, question),
    ]
    if plan.schedule not in ("gpipe", "interleaved"):
        drained = MICROBATCHES_PER_GPU * cluster.gpus
        gpipe = replace(question, schedule="gpipe", microbatches=drained, cost_model="resource")
        table.append(("gpipe, same cut", chosen, gpipe))
    rows = [_row(ledger, cluster, name, stages, how, how.price(ledger, stages, cluster)) for name, stages, how in table]
    first = _row(ledger, cluster, CHOSEN, chosen, asked, _price_of(ledger, plan, chosen))
    if plan.chunks > 1:
        first = _of_workers(plan, first, busy_s(ledger, chosen, plan.schedule, plan.microbatches))
    rows.insert(0, first)
    return Comparison(model=profile.model, cluster=cluster, rows=tuple(_against(rows[1], row) for row in rows))


def _price_of(ledger: Ledger, plan: Plan, stages: Sequence[Candidate]) -> Price:
    """The plan's price as it says itself: it may have been solved for other depths."""
    priced = price(
        ledger,
        stages,
        plan.cluster,
        model=plan.solver.cost_model,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
    )
    return replace(
        priced,
        seconds_per_minibatch=plan.predicted.seconds_per_minibatch,
        memory=tuple(stage.memory for stage in plan.stages),
    )


def _row(
    ledger: Ledger, cluster: Cluster, name: str, stages: Sequence[Candidate], question: Question, cost: Price
) -> Row:
    """A row that is not yet compared with data parallelism."""
    microbatches = question.microbatches_on(cluster)
    seconds = cost.seconds_per_minibatch / microbatches
    size = ledger.profile.microbatch_size
    memory = max(memory.total_bytes for memory in cost.memory)
    sent = cost.communication_bytes / microbatches
    workers = sum(stage.replicas for stage in stages)
    return Row(
        name=name,
        config=config_of(tuple(stage.replicas for stage in stages)),
        schedule=question.schedule,
        microbatches=microbatches,
        workers=workers,
        seconds_per_microbatch=seconds,
        samples_per_s=None if size is None else size / seconds,
        speedup_over_data_parallel=1.0,
        memory_bytes=memory,
        over_memory_bytes=0 if cluster.memory_bytes is None else max(0, memory - cluster.memory_bytes),
        communication_bytes=sent,
        communication_bytes_per_sample=None if size is None else sent / size,
        communication_cut=None,
        idle_share=1 - busy_s(ledger, stages, question.schedule, microbatches) / (workers * seconds),
    )


def _of_workers(plan: Plan, row: Row, busy: float) -> Row:
    """The row of a plan whose workers have several stages each."""
    memory, limit = max(map(plan.memory_bytes, range(len(plan.stages)))), plan.cluster.memory_bytes
    return row.model_copy(
        update={
            "config": plan.config,
            "workers": plan.workers,
            "memory_bytes": memory,
            "over_memory_bytes": 0 if limit is None else max(0, memory - limit),
            "idle_share": 1 - busy / plan.workers / row.seconds_per_microbatch,
        }
    )


def busy_s(ledger: Ledger, stages: Sequence[Candidate], schedule: ScheduleName, microbatches: int) -> float:
    """Seconds per microbatch that the workers of all stages compute, together.

    Each microbatch is one replica's work; of a minibatch's end, every replica updates its own weights. Under 1f1b that
    is once per round of as many minibatches as there are replicas, so that it adds up to one update per minibatch.
    """
    total = 0.0
    for stage in stages:
        work = ledger.work(stage)
        updates = 1 if schedule in ("1f1b", "naive") else stage.replicas / microbatches
        adding = max(0, microbatches - stage.replicas) / microbatches
        total += float(work.forward_s + work.recompute_s + work.backward_s) + updates * float(work.update_s)
        total += adding * float(work.accumulate_s)
    return total


def _against(data_parallel: Row, row: Row) -> Row:
    sent = data_parallel.communication_bytes
    return row.model_copy(
        update={
            "speedup_over_data_parallel": data_parallel.seconds_per_microbatch / row.seconds_per_microbatch,
            "communication_cut": 1 - row.communication_bytes / sent if sent > 0 else None,
        }
    )
