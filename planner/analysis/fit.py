"""Answer what a newcomer asks: does the model fit, how to split it, how fast is it, how few GPUs will do."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from planner.analysis.compare import LEAST_S, usual_ways, with_baselines
from planner.cost.tensor import layer_costs_on
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.late import LateFailure
from planner.formats.names import FLOAT_BYTES
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.options.verbs import SAMPLES
from planner.plan.lengths import mean_tokens
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.one_stage import FLUSH
from planner.solver.assemble import GIVEN, complete
from planner.solver.find_plan import ALIKE, find_plan, or_interleaved, setting_of
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.budget import Budget, Patience

MOST_SIZES, FIRST = 2, 0.6  # of microbatches, for which plans are sought; share of the first one's time
SOLVING = 0.6  # share of the time for the cluster that was asked about; other numbers of GPUs share the rest
# By the least parameters, of which the first that a model has counts.
MINIBATCH_TOKENS: Mapping[float, int] = {100e9: 4_000_000, 5e9: 2_000_000, 1e9: 1_000_000, 0: 500_000}
HALVES = "bfloat16", "float16"
MOST_TIMES = 16  # as many GPUs as asked are tried where the model does not fit
# Times as long as the number of GPUs before a number may take, whatever its part of the time: where little fits, what
# does is sought until there is some. It was twice as long for 128 H100 as for 256 of a model of 175 billion parameters.
LONGER = 2.0
NEXT = 0.25  # times as long as the number asked about does the next one take, likewise
BALANCED = 0.02  # of the least time: a way that is so near to it leaves nothing to divide layers for
WORSE = 0.05  # how much slower the next size must look, on the line through two smaller ones, not to be estimated


class FitRow(Record):
    """The fastest plan on some number of GPUs, or why there is none; in full for the number that was asked about."""

    gpus: int
    plan: Plan | None
    why_not: str = ""
    unknown: bool = False  # whether there was too little time to find a plan, or that there is none


class Fit(Shown, Record):
    """The answer for the GPUs that were asked about, and for others, the largest first.

    Where a model fits, those are half as many again and again, down to the first number at which it does not; where it
    does not fit, twice as many, up to the first at which it does; as far as there is time.
    """

    model: str
    asked: FitRow
    others: tuple[FitRow, ...]
    folder: str = ""  # that has profile.json and plan.json
    model_file: str = ""  # as seen from there
    late_failures: tuple[LateFailure, ...] = ()  # which of these files could not be written


def minibatch_of(options: SolveOptions, tokens: int | None, profile: Profile, gpus: int) -> int | None:
    """Return the samples of a minibatch, whole microbatches of the profile; None where the schedule divides none.

    Where nobody says, a minibatch has as many tokens as models of this size are trained with: 0.5, 1 and 2 million from
    no, 1 and 5 billion parameters on (Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1), and 4
    million from 100 on (BLOOM, Le Scao et al. 2022; Llama 3, Llama team 2024); or some microbatches per GPU. Where they
    are enough, all GPUs have equally many samples: only then can replicas divide gradients and weights.
    """
    each = mean_tokens(profile)
    if tokens is not None and (options.minibatch is not None or each is None):
        why = "`minibatch` says the same" if options.minibatch is not None else f"'{profile.model}' reads no tokens"
        raise InputError(f"`tokens={tokens}` makes no minibatch, because {why}", hint="leave out `tokens`")
    if options.minibatch is not None or not options.order.divides:
        return options.minibatch
    step = profile.microbatch_size or 1
    if each is None:
        return MICROBATCHES_PER_GPU * gpus * step * max(1, round(SAMPLES / step))
    parameters = sum(layer.weight_bytes for layer in profile.layers) / (2 if profile.dtype in HALVES else FLOAT_BYTES)
    usual = next(count for least, count in MINIBATCH_TOKENS.items() if parameters >= least)
    samples, odd = (tokens or usual) / each, gpus // (gpus & -gpus)
    step = math.lcm(step, odd) if math.lcm(step, odd) <= samples else step
    return step << max(0, round(math.log2(samples / step)))


def fit(
    profile_at: Callable[[int], Profile],
    divided: Callable[[Profile], Profile],
    sizes: Sequence[int],
    gpus: int,
    cluster_of: Callable[[int], Cluster],
    options: SolveOptions,
    patience: Patience | None = None,
    ranks: int = 1,
    *,
    interleaves: bool = False,
) -> tuple[Fit, Profile]:
    """Find the fastest plan for a number of GPUs and for others, each with the same minibatch, and its profile.

    Args:
        profile_at: returns the profile for microbatches of so many samples.
        divided: adds the costs of layers that ranks divide to a profile.
        sizes: of microbatches, ascending. Plans are sought for the one at which the fastest of the ways that people use
            is fastest, and for the next smaller one; where none of them fits, upwards until plans are no faster.
        ranks: at most, that divide layers.
        patience: how long all answers may take together, in place of the options' time limit.
        interleaves: whether plans under 1f1b-flush compete with interleaved ones.
    """
    patience, unfinished = patience or Patience.of(options.time_limit_s, options.progress), set[int]()

    def row(profile: Profile, count: int, patience: Patience) -> FitRow:
        why_not, found, cluster = "", None, cluster_of(count)
        try:
            found = find_plan(profile, cluster, options, patience, explains=count == gpus)
            found = with_baselines(profile, found, patience)
        except InputError:
            raise
        except PlannerError as error:  # none fits, or there was too little time
            why_not = error.message
            unfinished.update([] if isinstance(error, InfeasibleError) else [count])
        plan = _no_slower(profile, cluster, found, options, patience)
        if plan is not None and interleaves and plan.schedule is FLUSH:
            best = or_interleaved(profile, plan, options, patience)
            plan = plan if best is plan else best.model_copy(update={"baselines": plan.baselines})
        none = plan is None
        return FitRow(gpus=count, plan=plan, why_not=why_not if none else "", unknown=none and count in unfinished)

    def say(step: str) -> None:
        if patience.progress is not None:
            patience.progress.step = step

    def by_usual_ways(profile: Profile, most_s: float = LEAST_S) -> float:
        """Return the seconds of a sample in the fastest of the ways that people use; infinity where none fits."""
        cluster = cluster_of(gpus)
        budget = Budget(searching.at_most(most_s).deadline)
        ways = usual_ways(options, layer_costs_on(profile, cluster), cluster, budget)
        fitting = [way.seconds_per_microbatch for way in ways if not way.over_memory_bytes]
        return min(fitting, default=math.inf) / (profile.microbatch_size or 1)

    def least_s(profile: Profile) -> float:
        """Return seconds of a sample that no plan is below: ranks that divide a layer take no less in all."""
        setting = setting_of(options, profile, cluster_of(gpus))
        seconds = balanced_s(layer_costs_on(profile, setting.cluster), setting)
        return seconds / setting.microbatches / (profile.microbatch_size or 1)

    known, quick = {sizes[0]: profile_at(sizes[0])}, dict[int, float]()
    searching = patience.part(SOLVING)  # of what the capture of the model has left
    for size in sizes:
        say(f"estimating microbatches of {size}")
        if len(quick) > 1:
            one, other = list(quick)[-2:]
            if by_usual_ways(_extended(known[one], known[other], size), 0.0) > quick[other] * (1 + WORSE):
                break
        known[size] = known.get(size) or profile_at(size)
        quick[size] = by_usual_ways(known[size])
        if quick[size] > min(quick.values()) or math.isinf(quick[size]) or searching.deadline.passed:
            break
    likely = min(quick, key=lambda size: quick[size])
    tried = [likely, *(size for size in reversed(known) if size < likely)][:MOST_SIZES]
    if math.isinf(quick[likely]):
        tried = list(sizes)
    # Layers with experts are divided for microbatches of which each rank has as many samples as in other plans.
    shared = likely * ranks
    mixtures = any("grouped_mm" in layer.op for layer in known[likely].layers) and likely < shared
    mixtures &= len(sizes) > 1 and (options.minibatch or 1) % shared == 0
    tried[1:1] = [shared] if mixtures else []
    best: tuple[FitRow, Profile] | None = None
    began_s = time.monotonic()
    for size in tried:
        say(f"{gpus} GPUs, microbatches of {size}")
        profile = known.get(size) or profile_at(size)
        plan = None if best is None else best[0].plan
        if plan and plan.predicted.seconds_per_minibatch <= (plan.minibatch_size or 0) * least_s(profile):
            continue  # no plan is faster
        # Where dividing layers did not pay for one size of microbatches, it does not pay for smaller ones.
        whole = plan is not None and max(plan.degrees) == 1
        balanced = quick.get(size, math.inf) <= least_s(profile) * (1 + BALANCED)
        divides = size == shared if mixtures else not (whole or balanced)
        if divides and not searching.deadline.passed:
            profile = divided(profile)
        found = row(profile, gpus, searching.part(1 if size == tried[-1] else FIRST))
        if best is not None and best[0].plan is not None and found.plan is not None and found.plan.by_samples:
            # In the usual ways, a rank has as many samples as before.
            scale, ways = size / (best[1].microbatch_size or size), best[0].plan.baselines
            each_s = [{"seconds_per_microbatch": scale * way.seconds_per_microbatch} for way in ways]
            scaled = tuple(way.model_copy(update=each) for way, each in zip(ways, each_s, strict=True))
            found = found.model_copy(update={"plan": found.plan.model_copy(update={"baselines": scaled})})
        better = best is None or _seconds(found) < _seconds(best[0])
        best = (found, profile) if best is None or better else best
        if (not better and size != shared) or searching.deadline.passed or best[0].plan is None:
            break
    assert best is not None
    asked, profile = best
    if asked.unknown:
        asked = row(profile, gpus, patience.part(1.0))
    others = list[FitRow]()
    fewer = [gpus // 2**n for n in range(1, gpus.bit_length())]
    counts = [gpus * 2**n for n in range(1, MOST_TIMES.bit_length())] if asked.plan is None else fewer
    took_s = NEXT * (time.monotonic() - began_s)
    for index, count in enumerate(counts):
        left_s, began_s = patience.deadline.left_s, time.monotonic()
        if left_s is not None and left_s <= LONGER * took_s:
            break
        say(f"{count} GPUs")
        others.append(row(profile, count, patience.part(1 / (len(counts) - index))))
        if (others[-1].plan is None) == (asked.plan is not None):
            break
        took_s = time.monotonic() - began_s
    answer = Fit(model=profile.model, asked=asked, others=tuple(sorted(others, key=lambda row: -row.gpus)))
    return answer, profile


def _extended(one: Profile, other: Profile, size: int) -> Profile:
    """Return the profile for microbatches of so many samples, on the line through those for two smaller ones.

    But for what layers exchange: pipelines look faster than they are.
    """
    names = "forward_s", "backward_s", "saved_bytes", "workspace_bytes"
    first, second = one.microbatch_size or 1, other.microbatch_size or 1
    times, layers = (size - second) / (second - first), []
    for pair in zip(one.layers, other.layers, strict=True):
        ends = {name: [getattr(layer, name) for layer in pair] for name in names}
        line = {name: max(0, end + times * (end - begin)) for name, (begin, end) in ends.items()}
        layers.append(pair[1].model_copy(update=line))
    return other.model_copy(update={"layers": tuple(layers), "microbatch_size": size})


def _no_slower(
    profile: Profile, cluster: Cluster, plan: Plan | None, options: SolveOptions, patience: Patience
) -> Plan | None:
    """Return the plan, or the fastest allowed way that people use where a search that ran out of time missed it."""
    best: Plan | None = None
    best_s = math.inf if plan is None else plan.predicted.seconds_per_minibatch * (1 - ALIKE)
    asked = options.order, options.microbatches_on(cluster, profile)
    if options.recompute in ("always", "blocks"):
        return plan
    if plan is not None:
        asked, each_s = (plan.schedule, plan.microbatches), best_s / plan.microbatches
        if all(way.over_memory_bytes or way.seconds_per_microbatch >= each_s for way in plan.baselines):
            return plan
    costs, budget = layer_costs_on(profile, cluster), Budget(patience.at_most(LEAST_S).deadline)
    known = GIVEN if plan is None else plan.solver
    for way in usual_ways(options, costs, cluster, budget):
        problem, allowed = way.problem, way.plan.stages[0].options.level in way.problem.levels
        alike = (problem.schedule, problem.microbatches) == asked
        if alike and allowed and problem.allows(way.plan) and way.plan.seconds < best_s:
            bound_s = min(known.lower_bound_s, way.plan.seconds)
            report = known.model_copy(update={"lower_bound_s": bound_s, "gap": 1 - bound_s / way.plan.seconds})
            with suppress(InfeasibleError):  # copies of weights that several stages use do not fit
                best, best_s = complete(problem, way.plan, report), way.plan.seconds
    if best is None:
        return plan
    if plan is None:
        return with_baselines(profile, best, patience)
    return best.model_copy(update={"baselines": plan.baselines})


def _seconds(row: FitRow) -> float:
    return math.inf if row.plan is None else row.plan.predicted.seconds_per_minibatch
