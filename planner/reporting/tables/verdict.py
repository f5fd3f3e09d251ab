"""What a plan comes to, in the lines that stand above its tables: what to use, what it gains, and
at which price.
"""

from planner.analysis.limits import Limits
from planner.formats.plan import GIVEN, Plan
from planner.formats.plan_parts import OtherWay, config_words
from planner.solver.alternatives.usual_ways import ONE_GPU
from planner.stages.replicas import update_words
from planner.units import counted, format_bytes, format_times

# times as fast as the best baseline: a pipeline that gains less is not worth its trouble
LITTLE = 1.05


def verdict_lines(plan: Plan, limits: Limits | None) -> list[str]:
    """Return the verdict, and how the best synchronous plans compare with an asynchronous one."""
    lines = [f"{instead_words(plan)}{verdict(plan, limits)}; {mode_words(plan)}"]
    return lines + [synchronous_words(plan, way) for way in synchronous_ways(plan)]


def instead_words(plan: Plan) -> str:
    """Say under which schedule nothing fits, in a sentence of its own, where this plan is in place
    of one under that.
    """
    if plan.instead_of is None:
        return ""
    return f"Nothing fits under {plan.instead_of}, so this plan is under {plan.schedule}. "


def synchronous_ways(plan: Plan) -> list[OtherWay]:
    """Return the synchronous plans to name: none where the plan's own gradients are not stale,
    unless one is faster.
    """
    ways = [way for way in (plan.synchronous, plan.synchronous_usual) if way is not None]
    return [way for way in ways if plan.staleness or share_of_speed(plan, way) >= LITTLE]


def verdict(plan: Plan, limits: Limits | None) -> str:
    """Say what to use, and what it gains: "3 stages, 1.80x the best baseline (data parallel), 6%
    bubble".
    """
    over = max(map(plan.lacking_bytes, range(len(plan.stages))))
    if over:
        return f"Does not fit: {format_bytes(over)} too much on the fullest GPU"
    if len(plan.stages) == 1:
        return _without_pipeline(plan)

    parts = [counted(len(plan.stages), "stage")]
    best = best_baseline(plan)
    if best is not None:
        parts.append(_beside(plan, best))
    elif plan.baselines:
        parts.append("where no baseline fits the memory")

    if limits is not None:
        parts.append(f"{limits.bubble:.0%} bubble")
    if plan.estimated_faster:
        parts.append(f"{plan.estimated_faster}, within the error of estimates")
    words = ", ".join(parts)
    # Beside a hand-cut pipeline that is as fast, a pipeline may still gain much.
    if best is not None and not _is_pipeline(best) and share_of_speed(plan, best) * LITTLE > 1:
        words += f": a pipeline gains {_little(plan, best)} here"
    return words


def _beside(plan: Plan, best: OtherWay) -> str:
    speed = format_times(1 / share_of_speed(plan, best))
    named = f"the best baseline ({best.name}{_other_batch(plan, best)})"
    if speed == format_times(1):
        return f"as fast as {named}"
    return f"{speed} {named}"


def _other_batch(plan: Plan, way: OtherWay) -> str:
    """Say which global batch a way has, where it is not the plan's."""
    if way.samples_per_update in (None, plan.samples_per_update):
        return ""
    assert way.samples_per_update is not None
    return f" at a global batch of {update_words(way.samples_per_update, plan.microbatch_size)}"


def _is_pipeline(way: OtherWay) -> bool:
    return "-" in way.config


def _little(plan: Plan, best: OtherWay) -> str:
    if share_of_speed(plan, best) < 1:
        return "little"
    return "nothing"


def _without_pipeline(plan: Plan) -> str:
    """Say what a plan of one stage is, and where a search found it, that nothing else is faster."""
    (stage,) = plan.stages
    given = plan.solver.name == GIVEN
    rules = plan.solver.rules
    # With one stage at most no pipeline was looked for.
    knows_pipelines = not given and (rules is None or rules.max_stages != 1)
    if plan.workers == 1:
        if plan.cluster.gpus == 1 or not knows_pipelines:
            return "One GPU"
        if plan.estimated_faster:
            return f"Use one GPU: {plan.estimated_faster}, within the error of estimates"
        if plan.solver.status != "optimal":
            return "Use one GPU: no faster plan was found for more"
        return "Use one GPU: more would not be faster"

    if plan.divides_sequences:
        config = config_words(plan.config, plan.context_ranks)
        what = f"{plan.context_words} ({config})"
    elif stage.divides_layers:
        what = f"tensor parallelism ({config_words(plan.config)})"
    elif stage.shards_optimizer:
        what = f"data parallelism with {stage.sharding_words.removeprefix('data parallel, ')}"
    else:
        what = "data parallelism"

    if given:
        return f"{what[:1].upper()}{what[1:]}, as given"
    if plan.estimated_faster:
        return f"Use {what}: {plan.estimated_faster}, within the error of estimates"
    if not knows_pipelines:
        return f"Use {what}"
    if plan.solver.status != "optimal":
        return f"Use {what}: no pipeline was found that gains enough"
    return f"Use {what}: a pipeline gains nothing here"


def mode_words(plan: Plan) -> str:
    """Say whether gradients are stale: "asynchronous (PipeDream 1F1B, gradients up to 2 updates
    stale)".
    """
    if plan.staleness:
        stale = f"gradients up to {counted(plan.staleness, 'update')} stale"
        return f"asynchronous ({plan.schedule.known_as}, {stale})"
    if len(plan.stages) == 1:
        return "no stale gradients"
    return f"synchronous ({plan.schedule.known_as}, no stale gradients)"


def synchronous_words(plan: Plan, way: OtherWay) -> str:
    """Compare a plan with a synchronous one: "1f1b-flush at the same global batch: 0.91x, no stale
    gradients".
    """
    most = plan.samples_per_update[1]
    if way.samples_per_update is None:
        batch = f"in {way.microbatches} microbatches"
    elif way.samples_per_update == (most, most):
        batch = "at the same global batch"
    else:
        batch = f"at a global batch of {update_words(way.samples_per_update, plan.microbatch_size)}"

    speed = format_times(share_of_speed(plan, way))
    return f"{way.schedule} {batch}: {config_words(way.config)}, {speed}, no stale gradients"


def best_baseline(plan: Plan) -> OtherWay | None:
    """Return the fastest baseline that fits, of those with the plan's global batch if there are
    any; None without.

    To be faster than one GPU is no merit where another way uses several.
    """
    fitting = [way for way in plan.baselines if not way.over_memory_bytes]
    several = [way for way in fitting if way.name != ONE_GPU]
    alike = [way for way in several if way.samples_per_update in (None, plan.samples_per_update)]
    return min(
        alike or several or fitting, key=lambda way: way.seconds_per_microbatch, default=None
    )


def share_of_speed(plan: Plan, way: OtherWay) -> float:
    """Return how many times as fast as the plan another way is."""
    return plan.predicted.seconds_per_minibatch / plan.microbatches / way.seconds_per_microbatch
