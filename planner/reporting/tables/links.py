"""What is said of links whose bandwidth is a data sheet's, which nobody measured."""

from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import SlowLinks, SteadyPlan, config_words
from planner.units import as_fast, format_bandwidth, format_times

_MEASURE = (
    "measure them on the cluster with plan profile `links`, or give the rate that you measured as "
    "`bandwidth`"
)


def links_line(plan: Plan) -> str | None:
    """Say that a rate is a data sheet's, and what the plan comes to where links are slower; None
    where no rate is.
    """
    level = plan.cluster.level_by_data_sheet
    if level is None:
        return None
    rate = format_bandwidth(plan.cluster.levels[level].bandwidth_bytes_per_s)
    line = f"{rate} {_place(plan.cluster, level)} is from a data sheet, not measured"
    slow = plan.slow_links
    if slow is None:
        return line
    return f"{line}; {_at_slow_rate(plan, slow)}"


def links_warning(plan: Plan) -> tuple[str, str] | None:
    """Return a warning and a hint where another plan is faster on slower links; or None."""
    slow = plan.slow_links
    if slow is None or slow.fastest is None:
        return None
    return f"the choice depends on links that were not measured: {_faster(plan, slow)}", _MEASURE


def _at_slow_rate(plan: Plan, slow: SlowLinks) -> str:
    if slow.fastest is not None:
        return _faster(plan, slow)
    longer = f"at {format_bandwidth(slow.bytes_per_s)} this plan {_as_long(slow.slowdown)}"
    if not slow.complete:
        return f"{longer}; the time limit ended the search before it tried others there"
    return f"{longer}, and is still the fastest"


def _as_long(slowdown: float) -> str:
    if round(slowdown, 2) > 1:
        return f"takes {format_times(slowdown)} as long"
    return "takes as long"


def _faster(plan: Plan, slow: SlowLinks) -> str:
    """Say which plan is faster on slow links, and how far each is from the fastest."""
    assert slow.fastest is not None
    rate = format_bandwidth(plan.cluster.levels[slow.place].bandwidth_bytes_per_s)
    links = f"{format_bandwidth(slow.bytes_per_s)} {_place(plan.cluster, slow.place)}"
    faster = f"{_named(slow.fastest)} is {as_fast(slow.fastest.speedup)}"
    return f"on links of {links} instead of {rate}, {faster}; {_steadiest(slow)}"


def _steadiest(slow: SlowLinks) -> str:
    steadiest = slow.steadiest
    between = "at any rate between the two,"
    if steadiest is None:
        return f"{between} this plan is {_slower(slow.loss)} than the fastest, and none loses less"
    name = "it" if steadiest == slow.fastest else _named(steadiest)
    return (
        f"{between} {name} is {_slower(steadiest.loss)} than the fastest, "
        f"and this plan {_slower(slow.loss)}"
    )


def _slower(loss: float) -> str:
    share = f"{loss:.0%}"
    return "never slower" if share == "0%" else f"up to {share} slower"


def _named(way: SteadyPlan) -> str:
    words = [config_words(way.config)]
    if way.shards:
        words.append("a sharded optimizer's state")
    if way.recomputes:
        words.append("recomputation")
    if len(words) > 1:
        return f"{words[0]} with {' and '.join(words[1:])}"
    return words[0]


def _place(cluster: Cluster, level: int) -> str:
    joined = [number for number, each in enumerate(cluster.levels) if each.size > 1]
    if len(joined) == 1:
        return "per GPU"
    if level == joined[0]:
        return "inside a server"
    return "per server"
