"""From the chosen stages and their price to the Plan: names, ranks, transfers, predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.buckets import ready_s, reduced_s
from planner.cluster import Cluster
from planner.cost import backward_and_reduce_s, cost_model, link_of, ring_all_reduce_s
from planner.ledger import Candidate, Ledger, messages
from planner.plan_file import Plan, Prediction, ScheduleName, Shared, SolverReport, Stage, Transfer, config_of
from planner.price import Price
from planner.profile_file import Profile
from planner.sharing import SharedWeight
from planner.simulator.plan import simulated_s
from planner.solver.copies import adding_of_copies_s, copied_in, ready_of_gradients_s, shared_in, update_of_copies_s


def assemble(
    ledger: Ledger,
    cluster: Cluster,
    stages: Sequence[Candidate],
    price: Price,
    schedule: ScheduleName,
    microbatches: int,
    report: SolverReport,
    *,
    contiguous: bool = True,
) -> Plan:
    """The Plan of these stages, on consecutive ranks unless they say which."""
    profile = ledger.profile
    return Plan(
        model=profile.model,
        profile_digest=profile.digest,
        graph_hash=profile.graph_hash,
        autocast=profile.autocast,
        memory_format=profile.memory_format,
        compiled=profile.compiled is not None,
        device=profile.device,
        config=config_of(tuple(stage.replicas for stage in stages)),
        schedule=schedule,
        microbatch_size=profile.microbatch_size,
        microbatches=microbatches,
        stages=_stages(ledger, stages, price),
        transfers=transfers(ledger, stages, contiguous=contiguous),
        shared=shared_between(ledger, stages),
        contiguous=contiguous,
        predicted=_prediction(ledger, cluster, stages, price, microbatches, report),
        solver=report,
        cluster=cluster,
    )


def simulated_plan(plan: Plan) -> Plan:
    """The plan with the prediction of its own simulation.

    Raises:
        PlanError: for a plan that cannot be simulated.
    """
    seconds, before = simulated_s(plan), plan.predicted
    faster, bound_s = before.seconds_per_minibatch / seconds, min(plan.solver.lower_bound_s, seconds)
    predicted = before.model_copy(
        update={
            "seconds_per_minibatch": seconds,
            "by": "simulation",
            "samples_per_s": None if before.samples_per_s is None else before.samples_per_s * faster,
            "speedup_over_one_gpu": before.speedup_over_one_gpu * faster,
            "speedup_over_data_parallel": before.speedup_over_data_parallel * faster,
        }
    )
    report = plan.solver.model_copy(update={"lower_bound_s": bound_s, "gap": (seconds - bound_s) / seconds})
    return plan.model_copy(update={"predicted": predicted, "solver": report})


def transfers(ledger: Ledger, stages: Sequence[Candidate], *, contiguous: bool = True) -> tuple[Transfer, ...]:
    """What each stage sends to which (see `messages`)."""
    return tuple(
        Transfer(
            source=source,
            target=target,
            values=tuple(value.name for value in values),
            output_bytes=sum(value.output_bytes for value in values),
            gradient_bytes=sum(value.gradient_bytes for value in values),
        )
        for (source, target), values in sorted(messages(ledger, stages, contiguous=contiguous).items())
    )


def shared_between(ledger: Ledger, stages: Sequence[Candidate]) -> tuple[Shared, ...]:
    """The weights that two stages train, for each two of them."""
    layers = {layer.name: layer for layer in ledger.profile.layers}
    found: dict[tuple[int, int], list[SharedWeight]] = {}
    for weight in shared_in(ledger, stages):
        found.setdefault(weight.stages, []).append(weight)
    return tuple(
        Shared(
            stages=ends,
            weights=tuple(weight.name for weight in weights),
            # A weight is counted in the first layer that has it.
            gradient_bytes=sum(layers[name].gradient_bytes for name in {weight.layers[0] for weight in weights}),
        )
        for ends, weights in sorted(found.items())
    )


def _stages(ledger: Ledger, stages: Sequence[Candidate], price: Price) -> tuple[Stage, ...]:
    made: list[Stage] = []
    workers = len(stages) // price.chunks
    rank = 0
    copied = copied_in(ledger, stages)
    for stage, in_flight, memory, again in zip(stages, price.in_flight, price.memory, copied, strict=True):
        if len(made) % workers == 0:
            rank = 0  # under interleaved, the next chunk of the same workers
        layers = [ledger.profile.layers[index] for index in sorted(stage.layers)]
        made.append(
            Stage(
                layers=tuple(layer.name for layer in layers),
                ranks=stage.ranks or tuple(range(rank, rank + stage.replicas)),
                in_flight=in_flight,
                recompute=stage.recompute,
                forward_s=sum(layer.forward_s for layer in layers) / stage.speed,
                backward_s=sum(layer.backward_s for layer in layers) / stage.speed,
                update_s=sum(layer.update_s for layer in layers) / stage.speed + update_of_copies_s(stage, again),
                accumulate_s=sum(layer.accumulate_s for layer in layers) / stage.speed
                + adding_of_copies_s(stage, again),
                ready_s=ready_of_gradients_s(ledger, stage, again),
                memory=memory,
            )
        )
        rank += stage.replicas
    return tuple(made)


def _prediction(
    ledger: Ledger,
    cluster: Cluster,
    stages: Sequence[Candidate],
    price: Price,
    microbatches: int,
    report: SolverReport,
) -> Prediction:
    """Compared, per microbatch, with one GPU and with all GPUs data parallel, under the same cost model.

    Of data parallelism that is, with buckets that are as late as in a simulation, what its simulation says, too:
    nothing shares the links with its all-reduce.

    Both alternatives train one microbatch per GPU and step, whether or not their memory would suffice. Where devices
    differ, one GPU is the profiled one, and data parallel waits for the slowest.
    """
    profile = ledger.profile
    size = profile.microbatch_size
    everything = ledger.work(Candidate(frozenset(), frozenset(range(len(profile.layers))), 1))
    one_gpu_s = float(everything.compute_s)
    # The max-load model prices no replicas.
    model = cost_model("resource" if report.cost_model == "max-load" else report.cost_model, link_of(cluster))
    slowest = min((kind.speed for kind in cluster.kinds), default=1.0)
    data_parallel_s = float(model.stage_s(everything.at_speed(slowest), np.float64(cluster.gpus)))
    if price.cost_model_s is not None:
        data_parallel_s += _late_buckets_s(profile, cluster, slowest) / cluster.gpus
    data_parallel_bytes = 2 * (cluster.gpus - 1) / cluster.gpus * float(everything.trainable_bytes)
    seconds = price.seconds_per_minibatch
    samples = None if size is None else size * microbatches
    return Prediction(
        seconds_per_minibatch=seconds,
        by="cost model" if price.cost_model_s is None else "simulation",
        samples_per_s=None if samples is None else samples / seconds,
        bottleneck=price.bottleneck,
        speedup_over_one_gpu=one_gpu_s * microbatches / seconds,
        speedup_over_data_parallel=data_parallel_s * microbatches / seconds,
        communication_bytes_per_sample=None if samples is None else price.communication_bytes / samples,
        data_parallel_communication_bytes_per_sample=None if size is None else data_parallel_bytes / size,
        communication_cut=(
            1 - price.communication_bytes / microbatches / data_parallel_bytes if data_parallel_bytes > 0 else None
        ),
    )


def _late_buckets_s(profile: Profile, cluster: Cluster, speed: float) -> float:
    """How much later than by the formula all gradients are summed that all devices reduce."""
    link = link_of(cluster)
    if not link.overlap or cluster.gpus == 1:
        return 0.0
    parts_s = [seconds / speed for seconds in ready_s(profile.layers)]
    trained_bytes = sum(layer.gradient_bytes for layer in profile.layers)
    reduce_s = float(ring_all_reduce_s(trained_bytes, cluster.gpus, link))
    return reduced_s(parts_s, reduce_s) - float(backward_and_reduce_s(parts_s[-1], reduce_s, link))
