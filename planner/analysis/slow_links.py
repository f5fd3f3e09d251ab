"""What becomes of an answer where links are slower than their data sheet says.

A rate of a data sheet is an upper bound that clusters miss by up to ten times. So the plan is
priced again at a share of it, and other plans are searched for there. Slower links make no plan
faster: a plan that takes no longer on them is the fastest there, too, without a search.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.analysis.given_plan import GivenPlan, seconds_of
from planner.errors import InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import SlowLinks, SteadyPlan
from planner.solver.clock import Clock
from planner.solver.find_plan import find_plan
from planner.solver.request import Request


def leaving_time(request: Request) -> Request:
    """Ask for the answer itself, with time left for `with_slow_links` where that has something to
    ask.
    """
    if request.cluster.level_by_data_sheet is None:
        return request
    return request.within(1 - request.tuning.links.time_share)


def with_slow_links(plan: Plan, request: Request) -> Plan:
    """Return the plan with what slower links change; unchanged where no rate is a data sheet's.

    Args:
        plan: the answer.
        request: for it; its clock says how long all searches for other plans may take together.
    """
    level = plan.cluster.level_by_data_sheet
    if level is None:
        return plan

    shares = (*request.tuning.links.shares, 1.0)
    clusters = [plan.cluster.level_times_as_fast(level, share) for share in shares]
    try:
        slow_links = _slow_links(plan, _Known(request, clusters), level)
    except PlannerError as error:
        return plan.noting(f"slower links were not priced: {error.message}")

    return replace(plan, slow_links=slow_links)


@dataclass(frozen=True)
class _Known:
    """A request on clusters with ever faster links, the last one those of the data sheet."""

    request: Request
    clusters: Sequence[Cluster]

    @property
    def min_speedup(self) -> float:
        """Times as fast that a plan must be to count as faster."""
        return self.request.tuning.links.min_speedup

    def seconds(self, plan: Plan) -> list[float]:
        """Return the seconds per minibatch of a plan's stages on each of the clusters."""
        given = GivenPlan.of(self.request.profile, plan, Clock())
        return [seconds_of(given.request.on(each), given.stages) for each in self.clusters]

    def fastest(self, plan: Plan, number: int, share: float) -> Plan | None:
        """Return the fastest plan on one of the clusters under the schedule of `plan`; None where
        there was no time to find any.
        """
        options = replace(
            self.request.options,
            schedule=plan.schedule.unchunked,
            microbatches=plan.microbatches,
            minibatch=None,
            survive=0,
        )

        request = self.request.with_options(options).on(self.clusters[number]).within(share)
        if request.clock.passed:
            return None

        try:
            return find_plan(request)
        except InputError:
            raise
        except PlannerError:  # the plan itself fits, so the time ended before any was found
            return None


@dataclass(frozen=True)
class _Way:
    """A plan, and its seconds per minibatch on each of the clusters."""

    plan: Plan
    seconds: Sequence[float]

    def loss(self, least_s: Sequence[float]) -> float:
        """Return the largest share of the speed that it lacks to the least seconds on a cluster."""
        return max(1 - least / own for least, own in zip(least_s, self.seconds, strict=True))


def _slow_links(plan: Plan, known: _Known, level: int) -> SlowLinks:
    own = _Way(plan, known.seconds(plan))
    others, complete = _other_ways(own, known)
    ways = [own, *others]
    least_s = [min(column) for column in zip(*(way.seconds for way in ways), strict=True)]

    fastest = own
    steadiest = own
    if least_s[0] * known.min_speedup <= own.seconds[0]:
        fastest = min(ways, key=lambda way: way.seconds[0])
        steadiest = min(ways, key=lambda way: way.loss(least_s))

    def described(way: _Way) -> SteadyPlan | None:
        if way is own:
            return None
        return SteadyPlan(
            config=way.plan.config,
            recomputes=any(stage.recomputes for stage in way.plan.stages),
            shards=any(stage.shards_optimizer for stage in way.plan.stages),
            speedup=own.seconds[0] / way.seconds[0],
            loss=way.loss(least_s),
        )

    return SlowLinks(
        place=level,
        bytes_per_s=known.clusters[0].levels[level].bandwidth_bytes_per_s,
        slowdown=own.seconds[0] / own.seconds[-1],
        loss=own.loss(least_s),
        fastest=described(fastest),
        steadiest=described(steadiest),
        complete=complete,
    )


def _other_ways(own: _Way, known: _Known) -> tuple[list[_Way], bool]:
    """Return the fastest plans on the slower clusters, and whether there was time to find them.

    Where the plan is the fastest on the slowest links, it is not asked what lies between.
    """
    if own.seconds[0] <= own.seconds[-1]:
        return [], True

    ways = list[_Way]()
    slower = len(known.clusters) - 1
    for number in range(slower):
        plan = known.fastest(own.plan, number, 1 / (slower - number))
        if plan is None:
            return ways, False
        ways.append(_Way(plan, known.seconds(plan)))
        if own.seconds[0] < known.min_speedup * ways[0].seconds[0]:
            break

    return ways, True
