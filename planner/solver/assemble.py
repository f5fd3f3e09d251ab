"""Assemble the plan of the chosen stages: names, ranks, transfers and predictions."""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.cost.candidate import Candidate, whole_stage
from planner.cost.kinds import everything_on, fastest_rank
from planner.cost.network.link import backward_and_reduce_s, buckets_of, ring_all_reduce_s
from planner.cost.offload import host_bytes
from planner.cost.price_with_copies import price_with_copies
from planner.cost.utilisation import utilisation
from planner.cost.weight_copies import copied_in
from planner.formats.files import replace
from planner.formats.plan import GIVEN as GIVEN_NAME
from planner.formats.plan import Plan
from planner.formats.plan_parts import AskedRules, Prediction, SolverReport, Stage
from planner.formats.profile import ChunkedLoss, LossMean, Profile
from planner.options.solving import StageRules
from planner.plan.confidence import interval_of
from planner.plan.lengths import planned
from planner.plan.rank_groups import on_ranks
from planner.solver.by_hand import replicated
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.evaluate.pipelines import shared_between, stage_costs, transfers
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.stages.tensor import degrees_of
from planner.units import SLACK

# Of plans that no search found.
GIVEN = SolverReport(name=GIVEN_NAME, status="feasible", lower_bound_s=0.0, gap=1.0, seconds=0.0)


def complete(
    problem: Problem,
    best: Evaluation,
    report: SolverReport,
    *,
    accepts_loss: bool = False,
) -> Plan:
    """Return the plan of the chosen stages with what the searches leave out: copies of shared
    weights.

    Args:
        problem: that the plan solves.
        best: its stages, with their price.
        report: on how they were found.
        accepts_loss: whether the user accepts the mean of the microbatches' losses.

    Raises:
        InfeasibleError: where the copies do not fit the memory.
    """
    price = price_with_copies(problem.layer_costs, best.stages, best.price, problem.setting)
    whole = Evaluation(best.stages, price)
    return assemble(problem, whole, report, accepts_loss=accepts_loss)


def assemble(
    problem: Problem,
    best: Evaluation,
    report: SolverReport = GIVEN,
    *,
    accepts_loss: bool = False,
) -> Plan:
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
        base_bits=profile.base_bits,
        products=profile.products,
        stack=profile.stack,
        chunked_loss=_chunked_loss(profile, best),
        memory_format=profile.memory_format,
        compiled=profile.compiled is not None,
        tf32=profile.tf32,
        deterministic=bool(profile.deterministic),
        device=profile.device,
        config=best.config,
        schedule=problem.schedule,
        microbatch_size=profile.microbatch_size,
        loss=_loss(profile, accepted=accepts_loss),
        capture_checked=bool(profile.capture_checked),
        lengths=planned(profile, problem.microbatches),
        microbatches=problem.microbatches,
        stages=tuple(_stages(problem, best)),
        experts=max((max(costs.experts) for costs in used if costs.experts), default=None),
        by_samples=any(costs.by_samples for costs in used),
        experts_across=any(costs.alike_bytes is not None for costs in used),
        context=max((costs.context for costs in used if costs.context), default=None),
        # of each rank of a group
        transfers=transfers(problem.in_groups(stages)[0].layer_costs, stages),
        shared=shared_between(layer_costs, stages),
        predicted=_predict(problem, best),
        solver=replace(report, depth=problem.depth),
        cluster=problem.cluster,
    )


def _loss(profile: Profile, *, accepted: bool) -> LossMean | None:
    """Return what the loss is a mean over, with the mark of a user who accepts it divided."""
    if profile.loss is None or not accepted:
        return profile.loss
    return replace(profile.loss, accepted=True)


def _chunked_loss(profile: Profile, best: Evaluation) -> ChunkedLoss | None:
    """Return how the last stage computes its loss in chunks; None where it computes it whole."""
    chunked = profile.chunked_loss
    if chunked is None or any(
        stage.options.shards_gradients or stage.options.ranks_per_replica > 1
        for stage in best.stages
    ):
        return None

    last = [profile.layers[index].name for index in best.stages[-1].layers]
    if chunked.head not in last:
        return None
    return chunked


def _stages(problem: Problem, best: Evaluation) -> Iterator[Stage]:
    layer_costs = problem.layer_costs
    names = [layer.name for layer in layer_costs.profile.layers]
    ranks = on_ranks(best.ranks, degrees_of(stage.options for stage in best.stages))
    seconds = stage_costs(layer_costs, best.stages, problem.setting)
    offloaded = _host_bytes(problem, best.stages)

    for number, stage in enumerate(best.stages):
        costs = seconds[number]
        options = stage.options
        recompute = _recompute_words(stage, names)
        # Of a whole stage the forward's seconds are known.
        partly = options.shards_gradients or not isinstance(recompute, bool)
        yield Stage(
            layers=tuple(names[index] for index in sorted(stage.layers)),
            ranks=ranks[number],
            tensor=options.ranks_per_replica,
            in_flight=best.price.in_flight[number],
            sharded=options.shards_optimizer,
            sharding_level=options.sharding.level_in_files,
            shard_group=options.sharding.group or None,
            recompute=recompute,
            recompute_s=costs.recompute_s if options.recompute and partly else None,
            forward_s=costs.forward_s,
            backward_s=costs.backward_s,
            update_s=costs.update_s,
            accumulate_s=costs.accumulate_s,
            weights_s=costs.weights_s,
            ready_s=costs.ready_s,
            ready_shares=costs.ready_shares,
            forward_shares=costs.forward_shares,
            backward_shares=costs.backward_shares,
            exchanged=costs.exchanged,
            memory=best.price.memory[number],
            host_bytes=offloaded[number],
        )


def _host_bytes(problem: Problem, stages: Sequence[Candidate]) -> list[int]:
    """Return what each of a stage's ranks has in the memory of its host, duplicates of weights
    that other stages have among it.
    """
    if problem.cluster.offload is None:
        return [0] * len(stages)
    layer_costs = problem.layer_costs
    layers = layer_costs.profile.layers
    copies = copied_in(layer_costs, stages)
    offloaded = []
    for stage, copied in zip(stages, copies, strict=True):
        names = [layers[index].name for index in stage.layers]
        names += [layer.name for layer in copied]
        options = stage.options
        offloaded.append(
            host_bytes(layer_costs.given, names, options.ranks_per_replica, options.shards)
        )

    return offloaded


def _recompute_words(stage: Candidate, names: Sequence[str]) -> bool | tuple[tuple[str, ...], ...]:
    """Return the names of the layers in each group that recomputes; True for a whole stage as one
    group.
    """
    groups = stage.options.recompute
    if groups in ((), whole_stage(stage.layers)):
        return bool(groups)
    return tuple(tuple(names[index] for index in sorted(group)) for group in groups)


def _predict(problem: Problem, best: Evaluation) -> Prediction:
    """Predict the plan's speed, and compare it with one GPU of the fastest kind and with data
    parallelism.

    Both train the same minibatch in the same microbatches. Neither needs to fit the memory.
    """
    profile = problem.layer_costs.profile
    price = best.price
    seconds = best.seconds
    microbatches = problem.microbatches
    size = profile.microbatch_size
    samples = None if size is None else size * microbatches
    tokens = None
    if samples is not None and profile.tokens_per_sample is not None:
        tokens = samples * profile.tokens_per_sample

    parallel_s, parallel_bytes = _data_parallel(problem, simulates=best.simulated)
    cut = None
    if parallel_bytes > 0:
        cut = 1 - price.communication_bytes / microbatches / parallel_bytes
    used = None
    if not problem.cluster.kinds:  # devices of several kinds have several peaks
        used = utilisation(profile, microbatches, seconds, best.gpus // price.chunks)

    return Prediction(
        seconds_per_minibatch=seconds,
        by="simulation" if best.simulated else "cost model",
        samples_per_s=_ratio(samples, seconds),
        bottleneck=price.bottleneck,
        speedup_over_one_gpu=_one_gpu_s(problem) / seconds,
        speedup_over_data_parallel=parallel_s * microbatches / seconds,
        communication_bytes_per_sample=_ratio(price.communication_bytes, samples),
        data_parallel_communication_bytes_per_sample=_ratio(parallel_bytes, size),
        communication_cut=cut,
        tokens_per_s=_ratio(tokens, seconds),
        flop_utilisation=used,
        speed_interval=_speed_interval(problem, best),
    )


def _ratio(amount: float | None, count: float | None) -> float | None:
    """Return an amount for each of so many; None where one of the two is not known."""
    if amount is None or count is None:
        return None
    return amount / count


def _speed_interval(problem: Problem, best: Evaluation) -> tuple[float, float] | None:
    """Return between which shares of the speed runs like this plan were measured; None where none
    is known.
    """
    if problem.cluster.offload is not None:
        return None  # no measured run is known of it
    options = [stage.options for stage in best.stages]
    degrees = degrees_of(options)
    tensor = problem.layer_costs.profile.tensor or ()
    if any(costs.context for costs in tensor if costs.degree in degrees):
        return None  # of no such estimate a measured run is known

    interval = interval_of(
        problem.layer_costs.given,
        problem.cluster,
        divided=any(each.divides_layers for each in options),
        replicated=any(each.replicas > 1 for each in options),
    )
    if interval is None:
        return None
    return (interval.least, interval.most)


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
    everything = problem.layer_costs.work(stage)
    seconds = float(problem.asynchronous().stage_s(everything, np.float64(gpus)))
    if simulates and problem.link.overlap and gpus > 1:
        seconds += _late_buckets_s(problem, stage) / gpus
    return seconds, 2 * (gpus - 1) / gpus * float(everything.trainable_bytes)


def _late_buckets_s(problem: Problem, stage: Candidate) -> float:
    """Return by how much the all-reduce of real buckets ends later than the formula's even ones."""
    link = problem.link
    layers = problem.layer_costs.on_kind(stage.options.kind).profile.layers
    buckets = buckets_of(layers)
    gradient_bytes = sum(layer.gradient_bytes for layer in layers)
    reduce_s = float(ring_all_reduce_s(gradient_bytes, problem.cluster.gpus, link))
    by_formula_s = float(backward_and_reduce_s(buckets.ready_s[-1], reduce_s, link))
    return buckets.reduced_s(reduce_s) - by_formula_s


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


def report_of(problem: Problem, found: Answer, seconds: float) -> SolverReport:
    """Return what is known of a search's answer after so many seconds."""
    plan = found.best
    bound_s = min(found.bound_s, plan.seconds)
    if plan.simulated:
        optimal = plan.seconds <= bound_s * (1 + problem.tuning.evaluate.timing_share)
    else:
        optimal = plan.seconds <= bound_s * (1 + SLACK)
        bound_s = plan.seconds if optimal else bound_s

    return SolverReport(
        name=found.name,
        status="optimal" if optimal else "feasible",
        lower_bound_s=bound_s,
        bound_of=found.bound_of,
        cuts=found.cuts,
        gap=(plan.seconds - bound_s) / plan.seconds,
        seconds=seconds,
        cost_model_s=plan.price_s,
        simulated=problem.budget.count,
        exhausted=problem.budget.exhausted,
        rules=_asked(problem.rules),
    )


def _asked(rules: StageRules) -> AskedRules | None:
    asked = AskedRules(
        recompute=rules.recompute,
        shard_optimizer=rules.shard_optimizer,
        max_stages=rules.max_stages,
        max_staleness=rules.max_staleness,
        granularity=rules.granularity,
    )
    if asked == AskedRules():
        return None
    return asked
