"""One request, one search: the fastest plan under one schedule, with nothing beside it.

    find_plan           what is asked, as a problem; its answer, as a plan
      best_over_degrees   for each number of ranks that may divide the layers:
        _best_over_cuts     cuts between blocks, then inside blocks where that pays:
          best_plan           propose, evaluate, improve (`planner.solver.portfolio`)

`planner.solver.solve` asks for the candidates of an answer. All stages of a plan have groups of one
size, so a plan whose layers are divided is a plan for a cluster of groups.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from planner.errors import InfeasibleError, InputError, PlannerError, StoppedError
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import ALONG_ORDER, short_config
from planner.formats.profile import Profile
from planner.options.option import keywords_of
from planner.options.solving import SolveOptions
from planner.plan.blocks import block_ends
from planner.solver.assemble import complete, report_of
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.evaluate.pipelines import too_large
from planner.solver.portfolio import best_plan
from planner.solver.problem.bounds import relaxed_s
from planner.solver.problem.budget import Budget
from planner.solver.problem.cut_space import cut_after, searched_cuts
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.solver.request import Request, searched_problem
from planner.solver.tuning.record import Tuning
from planner.units import counted

# In a note on the fastest plan, which is not the answer.
STALER = " faster than this plan, but its gradients are up to "
BETWEEN = "cuts between blocks"  # what the bound of a search over those holds for


def find_plan(request: Request) -> Plan:
    """Find the fastest plan.

    Raises:
        UnexplainedError: if no plan fits the memory.
        InputError: for options that make no sense under the schedule.
        PlannerError: if the time ends before there is any plan.
    """
    started = time.perf_counter()

    # 1. What is asked, and a first bound for those who wait.
    problem = searched_problem(request, request.budget())
    degrees = problem.rules.tensor
    bound_s = min(relaxed_s(problem.on_groups_of(degree)) for degree in degrees)
    request.clock.progress.begin(request.clock.at_s, bound_s)

    # 2. The answer.
    answer = _settled(problem, best_over_degrees(problem))

    # 3. As a plan.
    report = report_of(problem, answer, time.perf_counter() - started)
    accepts = request.options.accept_divided_loss
    plan = complete(problem, answer.best, report, accepts_loss=accepts)
    if answer.staler is not None:
        plan = _noting_staler(plan, answer.staler, problem.tuning)
    if answer.untried_degrees:
        plan = plan.noting(_untried_words(request.profile, answer.untried_degrees))
    return plan


def best_over_degrees(problem: Problem) -> Answer:
    """Find the best plan over the degrees that the rules allow.

    Raises:
        InfeasibleError: if no plan fits the memory.
        PlannerError: if the deadline passes before any plan is found.
        InputError: for what no search takes.
    """
    degrees = problem.rules.tensor
    if degrees == (1,):
        return _best_over_cuts(problem)

    # 1. Where a schedule drains, the more promising degrees come first, because others may not be
    #    worth a search then.
    trials = _DegreeTrials(problem)
    least_s = {degree: _relaxed_s(problem.on_groups_of(degree)) for degree in degrees}
    order = list(degrees)
    drains = not problem.schedule.asynchronous
    if drains:
        order.sort(key=least_s.__getitem__)

    # 2. Each that may be faster than those before has a share of the time that is left.
    for number, degree in enumerate(order):
        if trials.best_s < least_s[degree]:
            trials.missed.append(degree)
            continue
        if trials.answers and problem.clock.passed:
            trials.missed.append(degree)
            trials.untried.append(degree)
            continue

        left = len(order) - number
        if drains:
            left = min(left, 2)
        trials.search(degree, 1 / left)

    return trials.answer()


@dataclass
class _DegreeTrials:
    """What is known of plans on groups of each number of ranks."""

    problem: Problem
    answers: list[Answer] = field(default_factory=list)
    obstacles: list[PlannerError] = field(default_factory=list)
    # degrees without a search, or whose search had too little time
    missed: list[int] = field(default_factory=list)
    # those that may have the best plan, for which the time did not suffice
    untried: list[int] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        return min(map(self._comparable_s, self.answers), default=math.inf)

    def search(self, degree: int, share: float) -> None:
        """Search for plans on groups of so many ranks, within a share of the time that is left."""
        # The same stages are other plans here, so what was simulated is counted apart.
        budget = self.problem.budget
        part = replace(budget.apart(), clock=budget.clock.part(share))
        groups = replace(self.problem, budget=part).on_groups_of(degree)

        try:
            on_groups = _best_over_cuts(replace(groups, hopeless_s=self.best_s))
        except InputError:
            raise
        except PlannerError as error:
            self.obstacles.append(error)
            if not isinstance(error, InfeasibleError):
                self.missed.append(degree)
                self.untried.append(degree)
        else:
            self.answers.append(on_groups.divided(degree))

        budget.exhausted &= part.exhausted

    def answer(self) -> Answer:
        """Return the fastest of the answers, with a bound on the plans of all degrees."""
        if not self.answers:
            raise _obstacle(self.obstacles)

        # 1. Of the degrees that were searched.
        fastest = min(self.answers, key=lambda each: (self._comparable_s(each), each.best.gpus))
        chosen = self._least_late(fastest)
        bound_s = min(each.bound_s for each in self.answers)
        bounds_of = [each.bound_of for each in self.answers]

        # 2. Of the others, with the same cuts.
        between_blocks = any(BETWEEN in each for each in bounds_of)
        for degree in self.missed:
            groups = self.problem.on_groups_of(degree)
            if between_blocks:
                groups = cut_after(groups, block_ends(self.problem.layer_costs.profile))
            cuts = searched_cuts(groups)
            bound_s = min(bound_s, relaxed_s(groups, cuts.space))
            bounds_of.append(cuts.bound_of)

        return Answer(
            chosen.best,
            min(bound_s, chosen.best.seconds),
            bound_of=_joined(bounds_of),
            cuts=chosen.cuts,
            untried_degrees=tuple(sorted(self.untried)),
            staler=chosen.staler if chosen is fastest else fastest.best,
        )

    def _least_late(self, fastest: Answer) -> Answer:
        """Return the least late one of the answers that are nearly as fast as the fastest, as
        within one degree.
        """
        if not self.problem.schedule.stashes:
            return fastest
        ratio = self.problem.tuning.evaluate.min_speedup_per_stale_update
        nearly_s = self._comparable_s(fastest) * ratio
        near = [each for each in self.answers if self._comparable_s(each) < nearly_s]
        return min(
            [fastest, *near],
            key=lambda each: (max(each.best.price.in_flight), self._comparable_s(each)),
        )

    def _comparable_s(self, answer: Answer) -> float:
        return self.problem.comparable_s(answer.best)


def _obstacle(errors: Sequence[PlannerError]) -> PlannerError:
    """Return the error that says most of why no degree has a plan: too little time, or what needs
    the least memory.
    """
    for error in errors:
        if not isinstance(error, InfeasibleError):
            return error

    unexplained = [error for error in errors if isinstance(error, UnexplainedError)]
    if not unexplained:
        return errors[0]

    def leanest() -> InfeasibleError:
        explained = [error.explanation() for error in unexplained]
        return min(explained, key=lambda error: error.least_bytes)

    return UnexplainedError(leanest)


def _best_over_cuts(problem: Problem) -> Answer:
    """Find the best plan that cuts between blocks, or inside blocks where that makes it 2% faster.

    Inside blocks it is sought among all cuts if those are few, and otherwise beside the cuts that
    were found. Raise InputError where `granularity` asks for blocks, and the model has none.
    """
    # 1. Where blocks end, if cuts there have a search of their own.
    profile = problem.layer_costs.profile
    granularity = problem.rules.granularity
    ends = frozenset[int]()
    if granularity != "layer" and problem.solver != "ilp":
        ends = block_ends(profile)
    if not ends and granularity == "block":
        raise InputError(
            f"`granularity=block` is for models of repeated blocks, and '{profile.model}' has none",
            hint="use `granularity=layer`",
        )

    if not ends:
        return best_plan(problem)

    # 2. Between blocks.
    blocks = cut_after(problem, ends)
    if granularity == "block":
        return best_plan(blocks)
    try:
        between = best_plan(blocks)
    except InfeasibleError:
        if len(profile.layers) > _most_cuts(problem):
            raise
        return best_plan(problem)  # smaller stages may fit

    # 3. Inside them.
    return _inside_blocks(problem, ends, between)


def _inside_blocks(problem: Problem, ends: frozenset[int], between: Answer) -> Answer:
    """Return the answer between blocks, or one that also cuts inside them; bound plans that cut
    anywhere.
    """
    # 1. What any cuts may gain.
    searched = searched_cuts(problem)
    bound_s = relaxed_s(problem, searched.space)
    bound_of = searched.bound_of
    saving = problem.tuning.answer.min_saving_share
    may_pay = bound_s < between.best.seconds * (1 - saving)

    # 2. All cuts where these are few, or those beside the plan's own.
    most = _most_cuts(problem)
    in_time = not problem.clock.passed
    everywhere = in_time and len(problem.layer_costs.profile.layers) <= most
    if everywhere:
        cuts = _all_cuts(problem)
    else:
        cuts = ends | _beside(problem, ends, between.best)

    # 3. A search over them.
    best = between
    inside = None
    if may_pay and in_time and cuts != ends and len(cuts) <= most:
        inside = _if_any(problem if everywhere else cut_after(problem, cuts))
    if inside is not None:
        if everywhere:
            bound_s = inside.bound_s
            bound_of = inside.bound_of
        if problem.is_faster(inside.best, between.best, saving):
            best = inside

    # 4. What the bound is of. Of plans that cut between blocks a search knows well how little the
    #    memory leaves to recompute.
    anywhere_known = everywhere or problem.schedule.asynchronous or best is not between
    if may_pay and not anywhere_known and between.bound_s > bound_s:
        bound_s = between.bound_s
        bound_of = _joined([BETWEEN, between.bound_of])
    if ALONG_ORDER in bound_of and not best.best.in_order:
        bound_s = relaxed_s(problem)
        bound_of = ""

    return replace(best, bound_s=min(bound_s, best.best.seconds), bound_of=bound_of)


def _if_any(problem: Problem) -> Answer | None:
    """Return the best plan of a problem, or None where none is found: there is an answer without
    it.
    """
    try:
        return best_plan(problem)
    except (InputError, StoppedError):
        raise
    except PlannerError:
        problem.budget.exhausted = False
        return None


def _all_cuts(problem: Problem) -> frozenset[int]:
    return frozenset(range(len(problem.layer_costs.profile.layers) - 1))


def _most_cuts(problem: Problem) -> int:
    quick = problem.schedule.asynchronous and problem.cluster.memory_bytes is None
    tuning = problem.tuning.answer
    if quick:
        return tuning.most_cuts
    return tuning.most_limited_cuts


def _beside(problem: Problem, ends: frozenset[int], plan: Evaluation) -> frozenset[int]:
    """Return the cuts inside the blocks on either side of each of the plan's cuts."""
    cuts = {len(stage.before) - 1 for stage in plan.stages[1:]}
    starts = sorted({-1, *ends, len(problem.layer_costs.profile.layers) - 1})
    beside: set[int] = set()
    for cut in cuts & ends:
        place = starts.index(cut)
        beside.update(range(starts[place - 1] + 1, starts[place + 1]))

    return frozenset(beside)


def _relaxed_s(problem: Problem) -> float:
    return relaxed_s(problem, searched_cuts(problem).space)


def _joined(bounds_of: Iterable[str]) -> str:
    """Return of which plans several bounds are at once."""
    parts = (part for each in bounds_of for part in each.split(", ") if part)
    return ", ".join(dict.fromkeys(parts))


def _noting_staler(plan: Plan, staler: Evaluation, tuning: Tuning) -> Plan:
    """Return the plan with how much faster the fastest one is, whose gradients are staler."""
    gain = plan.predicted.seconds_per_minibatch / staler.seconds
    if gain <= 1 + tuning.evaluate.timing_share:
        return plan

    late = max(plan.schedule.staleness(depth) for depth in staler.price.in_flight)
    enough = tuning.evaluate.min_speedup_per_stale_update
    config = short_config(staler.config)
    if staler.config == plan.config:
        config = f"another cut of {config}"
    return plan.noting(
        f"{config} is {gain - 1:.1%}{STALER}{counted(late, 'update')} stale in place of "
        f"{plan.staleness}, for which it should be {enough - 1:.0%} faster"
    )


def _untried_words(profile: Profile, degrees: Sequence[int]) -> str:
    """Say what the time did not suffice for: "layers sharded over 4, 8 ranks"."""
    parts = ["whole layers"] if 1 in degrees else []
    of_sequences = {costs.degree for costs in profile.tensor or () if costs.context}
    for what, own in (
        ("layers", [degree for degree in degrees if degree not in of_sequences]),
        ("sequences", [degree for degree in degrees if degree in of_sequences]),
    ):
        divided = [str(degree) for degree in own if degree > 1]
        if divided:
            parts.append(f"{what} sharded over {', '.join(divided)} ranks")

    return f"the time limit ended the search of {' and '.join(parts)}"


def _settled(problem: Problem, answer: Answer) -> Answer:
    """Return the answer of a schedule that drains with its simulated time, and divided as little as
    is as fast.

    Without its waiting, which may be half of its time, nobody could compare the plan with others.
    """
    if problem.schedule.formula != "synchronous" or problem.cluster.kinds:
        return answer
    seconds = problem.tuning.answer.last_simulation_s
    budget = Budget.last(problem.budget.clock, seconds, problem.tuning.budget)
    last = replace(problem, budget=budget)

    best = answer.best
    if not (best.simulated or too_large(problem, best.stages)):
        answer = answer.with_best(evaluate(last, best.stages))
    return plainest(last, answer)


def plainest(problem: Problem, answer: Answer) -> Answer:
    """Return the answer with replicas of a single stage that divide as little as takes as long, by
    estimates.
    """
    best = answer.best
    (stage, *others) = best.stages
    options = stage.options
    if others or options.divides_layers or problem.rules.shard_optimizer == "always":
        return answer

    indistinguishable_s = best.seconds * (1 + problem.tuning.answer.indistinguishable_share)
    for sharding in options.sharding.less():
        plainer = replace(stage, options=options.with_sharding(sharding))
        plan = evaluate(problem, [plainer])
        as_fast = plan.simulated == best.simulated and plan.seconds <= indistinguishable_s
        if as_fast and problem.allows(plan):
            return answer.with_best(plan)

    return answer


@keywords_of(SolveOptions)
def search_plan(profile: Profile, cluster: Cluster, options: SolveOptions) -> Plan:
    """Find the fastest plan under one schedule, with nothing beside it: `find_plan`, with options
    as keywords.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
    """
    try:
        return find_plan(Request.of(profile, cluster, options))
    except UnexplainedError as error:
        raise error.explanation() from None
