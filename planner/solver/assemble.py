"""Assemble the plan of the chosen stages: names, ranks, transfers and predictions."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.cost.candidate import Candidate, whole_stage
from planner.cost.communicators import with_overheads
from planner.cost.kinds import everything_on, fastest_rank
from planner.cost.network.link import backward_and_reduce_s, buckets_of, ring_all_reduce_s
from planner.cost.utilisation import utilisation
from planner.cost.weight_copies import price_with_copies
from planner.formats.plan import GIVEN as GIVEN_NAME
from planner.formats.plan import Plan
from planner.formats.plan_parts import Prediction, SolverReport, Stage
from planner.plan.confidence import interval_of
from planner.plan.lengths import planned
from planner.plan.rank_groups import on_ranks
from planner.simulator.simulate_plan import simulated_s
from planner.solver.choose.baselines import replicated
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.evaluate.pipelines import shared_between, stage_costs, transfers
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.stages.tensor import degrees_of

# Of plans that no search found.
GIVEN = SolverReport(name=GIVEN_NAME, status="feasible", lower_bound_s=0.0, gap=1.0, seconds=0.0)

# Of a prediction, all that a shorter time per minibatch makes larger.
RATES = (
    "samples_per_s",
    "tokens_per_s",
    "flop_utilisation",
    "speedup_over_one_gpu",
    "speedup_over_data_parallel",
)


def complete(problem: Problem, best: Evaluation, report: SolverReport) -> Plan:
    """Return the plan of the chosen stages with what the searches leave out: copies of shared
    weights.

    Raise InfeasibleError when the copies do not fit the memory.
    """
    price = price_with_copies(problem.layer_costs, best.stages, best.price, problem.setting)
    price = replace(
        price, memory=with_overheads(problem.layer_costs, best.stages, price.memory, price.workers)
    )
    plan = assemble(problem, Evaluation(best.stages, price), report)
    before = plan.predicted
    if before.by != "simulation" or not plan.shared:
        return plan
    # Candidates were simulated without shared weights.
    seconds = simulated_s(plan)
    bound_s = min(report.lower_bound_s, seconds)
    predicted = _at_pace(before, seconds)
    solver = plan.solver.model_copy(
        update={"lower_bound_s": bound_s, "gap": (seconds - bound_s) / seconds}
    )
    return plan.model_copy(update={"predicted": predicted, "solver": solver})


def _at_pace(prediction: Prediction, seconds: float) -> Prediction:
    """Return the prediction for another time per minibatch."""
    faster = prediction.seconds_per_minibatch / seconds
    changes = {"seconds_per_minibatch": seconds}
    for name in RATES:
        rate = getattr(prediction, name)
        if rate is not None:
            changes[name] = rate * faster
    return prediction.model_copy(update=changes)


def assemble(problem: Problem, best: Evaluation, report: SolverReport = GIVEN) -> Plan:
    """Return the plan of these stages, on consecutive ranks unless they say which."""
    layer_costs = problem.layer_costs
    stages = best.stages
    profile = layer_costs.profile
    degrees = degrees_of(stage.options for stage in stages)
    used = [costs for costs in profile.tensor or () if costs.degree in degrees]
    return Plan(
        model=profile.model,
        profile_digest=layer_costs.given.digest,
        graph_hash=profile.graph_hash,
        autocast=profile.autocast,
        master_weights=profile.master_weights,
        memory_format=profile.memory_format,
        compiled=profile.compiled is not None,
        tf32=profile.tf32,
        deterministic=bool(profile.deterministic),
        device=profile.device,
        config=best.config,
        schedule=problem.schedule,
        microbatch_size=profile.microbatch_size,
        loss=profile.loss,
        capture_checked=bool(profile.capture_checked),
        lengths=planned(profile, problem.microbatches),
        microbatches=problem.microbatches,
        stages=tuple(_stages(problem, best)),
        experts=max((max(costs.experts) for costs in used if costs.experts), default=None),
        by_samples=any(costs.by_samples for costs in used),
        # of each rank of a group
        transfers=transfers(problem.in_groups(stages)[0].layer_costs, stages),
        shared=shared_between(layer_costs, stages),
        predicted=_predict(problem, best),
        solver=report.model_copy(update={"depth": problem.depth}),
        cluster=problem.cluster,
    )


def _stages(problem: Problem, best: Evaluation) -> Iterator[Stage]:
    layer_costs = problem.layer_costs
    names = [layer.name for layer in layer_costs.profile.layers]
    ranks = on_ranks(best.ranks, degrees_of(stage.options for stage in best.stages))
    for number, (stage, costs) in enumerate(
        zip(best.stages, stage_costs(layer_costs, best.stages, problem.setting), strict=True)
    ):
        groups = stage.options.recompute
        whole = groups in ((), whole_stage(stage.layers))
        named = tuple(tuple(names[index] for index in sorted(group)) for group in groups)
        yield Stage(
            layers=tuple(names[index] for index in sorted(stage.layers)),
            ranks=ranks[number],
            tensor=stage.options.ranks_per_replica,
            in_flight=best.price.in_flight[number],
            sharded=stage.options.shards_optimizer,
            sharding_level=stage.options.sharding.level_in_files,
            shard_group=stage.options.sharding.group or None,
            recompute=bool(groups) if whole else named,
            recompute_s=costs.recompute_s
            if groups and (stage.options.shards_gradients or not whole)
            else None,
            forward_s=costs.forward_s,
            backward_s=costs.backward_s,
            update_s=costs.update_s,
            accumulate_s=costs.accumulate_s,
            ready_s=costs.ready_s,
            ready_shares=costs.ready_shares,
            forward_shares=costs.forward_shares,
            backward_shares=costs.backward_shares,
            exchanged=costs.exchanged,
            memory=best.price.memory[number],
        )


def _predict(problem: Problem, best: Evaluation) -> Prediction:
    """Predict the plan's speed, and compare it with one GPU of the fastest kind and with data
    parallelism.

    Both train the same minibatch in the same microbatches. Neither needs to fit the memory.
    """
    price = best.price
    seconds = best.seconds
    microbatches = problem.microbatches
    profile = problem.layer_costs.profile
    parallel_s, parallel_bytes = _data_parallel(problem, simulates=best.simulated)

    size = profile.microbatch_size
    samples = None if size is None else size * microbatches
    tokens = profile.tokens_per_sample
    return Prediction(
        seconds_per_minibatch=seconds,
        by="simulation" if best.simulated else "cost model",
        samples_per_s=None if samples is None else samples / seconds,
        bottleneck=price.bottleneck,
        speedup_over_one_gpu=_one_gpu_s(problem) / seconds,
        speedup_over_data_parallel=parallel_s * microbatches / seconds,
        communication_bytes_per_sample=None
        if samples is None
        else price.communication_bytes / samples,
        data_parallel_communication_bytes_per_sample=None
        if size is None
        else parallel_bytes / size,
        communication_cut=(
            1 - price.communication_bytes / microbatches / parallel_bytes
            if parallel_bytes > 0
            else None
        ),
        tokens_per_s=None if samples is None or tokens is None else samples * tokens / seconds,
        # Devices of several kinds have several peaks.
        flop_utilisation=(
            None
            if problem.cluster.kinds
            else utilisation(profile, microbatches, seconds, best.gpus // price.chunks)
        ),
        speed_interval=_speed_interval(problem, best),
    )


def _speed_interval(problem: Problem, best: Evaluation) -> tuple[float, float] | None:
    divided = any(stage.options.divides_layers for stage in best.stages)
    interval = interval_of(problem.layer_costs.given, problem.cluster, divided=divided)
    return None if interval is None else (interval.least, interval.most)


def _one_gpu_s(problem: Problem) -> float:
    """Return the seconds per minibatch of one GPU, with one update."""
    fastest = fastest_rank(problem.layer_costs, problem.cluster)
    work = problem.layer_costs.work(everything_on(problem.layer_costs, problem.cluster, [fastest]))
    update_s = float(work.update_s)
    once_s = float(work.compute_s - work.update_s)
    adding_s = (problem.microbatches - 1) * float(work.accumulate_s)
    return problem.microbatches * once_s + adding_s + update_s


def _data_parallel(problem: Problem, *, simulates: bool) -> tuple[float, float]:
    """Return seconds and bytes per microbatch of data parallelism on as many GPUs as have a
    microbatch.
    """
    stage = replicated(problem)
    if problem.schedule.divides or problem.layer_costs.profile.lengths:
        return _divided(problem, stage, simulates)
    return _undivided(problem, stage, simulates)


def _undivided(problem: Problem, stage: Candidate, simulates: bool) -> tuple[float, float]:
    """Return seconds and bytes per minibatch, of which each GPU has one per step.

    If its gradient buckets are ready as late as in a simulation, the formula equals its simulation:
    nothing else uses the links during its all-reduce. Where devices differ, it waits for the
    slowest.
    """
    gpus = problem.cluster.gpus
    link = problem.link
    everything = problem.layer_costs.work(stage)
    seconds = float(problem.asynchronous().stage_s(everything, np.float64(gpus)))
    if simulates and link.overlap and gpus > 1:
        layers = problem.layer_costs.on_kind(stage.options.kind).profile.layers
        buckets = buckets_of(layers)
        gradient_bytes = sum(layer.gradient_bytes for layer in layers)
        reduce_s = float(ring_all_reduce_s(gradient_bytes, gpus, link))
        by_formula_s = float(backward_and_reduce_s(buckets.ready_s[-1], reduce_s, link))
        seconds += (buckets.reduced_s(reduce_s) - by_formula_s) / gpus
    return seconds, 2 * (gpus - 1) / gpus * float(everything.trainable_bytes)


def _divided(problem: Problem, stage: Candidate, simulates: bool) -> tuple[float, float]:
    """Return seconds and bytes per microbatch of a minibatch that is divided over the GPUs.

    Where lengths vary this simulates schedules that do not divide minibatches, too: replicas wait
    for the longest.
    """
    # One stage has no chunks. Its simulation is not part of the search, so it does not count.
    unchunked = problem.with_schedule(problem.schedule.unchunked)
    budget = Budget.unlimited(tuning=problem.tuning.budget)
    alone = replace(unchunked, depth="auto", budget=budget)
    parallel = priced(alone, [stage])
    if simulates:
        parallel = simulated(alone, parallel)
    return (
        parallel.seconds / alone.microbatches,
        parallel.price.communication_bytes / alone.microbatches,
    )
