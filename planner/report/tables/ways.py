"""What is said of a plan beside other ways to train: no ratio to a way that does not fit the memory."""

from __future__ import annotations

from planner.analysis.usual_ways import DATA_PARALLEL, ONE_GPU
from planner.formats.plan import Plan
from planner.formats.plan_parts import OtherWay, short_config
from planner.units import format_bytes, format_rate, format_seconds, format_times, times_words


def over_one_gpu(plan: Plan) -> str:
    """Write the speed-up over one GPU: "1.86x"; or that the model does not fit one."""
    return speed_over(plan.predicted.speedup_over_one_gpu, plan.over_memory_bytes(ONE_GPU))


def over_data_parallel(plan: Plan) -> str:
    """Write the speed-up over data parallelism, or that it does not fit."""
    return speed_over(plan.predicted.speedup_over_data_parallel, plan.over_memory_bytes(DATA_PARALLEL))


def speed_over(ratio: float | None, over_memory_bytes: int) -> str:
    """Write a speed-up: "1.86x"; nothing where it is None; or that one of the two ways does not fit the memory."""
    if over_memory_bytes:
        return f"does not fit ({format_bytes(over_memory_bytes)} too many)"
    return "" if ratio is None else format_times(ratio)


def speed_up_line(plan: Plan, gpus: str) -> str:
    """Write both; `gpus`: on how many GPUs data parallelism runs."""
    if over := max(map(plan.lacking_bytes, range(len(plan.stages)))):
        return f"none: the plan {speed_over(None, over)}"
    one, parallel = over_one_gpu(plan), over_data_parallel(plan)
    over_one = f"{one} over one GPU" if one.endswith("x") else f"one GPU {one}"
    over_parallel = (
        f"{parallel} over data parallel on {gpus}" if parallel.endswith("x") else f"data parallel {parallel}"
    )
    return f"{over_one}, {over_parallel}"


def best_baseline_line(plan: Plan) -> str | None:
    """Compare the plan with the fastest baseline that fits; None where data parallelism is that, or none is known."""
    fitting = [way for way in plan.baselines if not way.over_memory_bytes]
    best = min(fitting, key=lambda way: way.seconds_per_microbatch, default=None)
    if best is None:
        return "none of them fits the memory" if plan.baselines else None
    if best.name == DATA_PARALLEL:
        return None
    ratio, name = _ratio(plan, best), f"{best.name} ({short_config(best.config)})"
    if ratio < 1:
        return f"{name} fits and is faster: the plan is {times_words(ratio)} as fast"
    times = format_times(ratio)
    return f"{'as fast as' if times == '1.00x' else f'{times} over'} the fastest other way that fits, {name}"


def synchronous_line(plan: Plan) -> str | None:
    """Say what the best synchronous plan would give; None where that was not searched for."""
    way = plan.synchronous
    if way is None:
        return None
    each_s, size = way.seconds_per_microbatch, plan.microbatch_size
    pace = f"{format_seconds(each_s)} per microbatch" if size is None else f"{format_rate(size / each_s)} samples/s"
    name, share = f"{way.schedule} {short_config(way.config)}", share_of_speed(plan, way)
    return f"{name}, whose gradients are never late: {pace}, {times_words(share)} as fast"


def share_of_speed(plan: Plan, way: OtherWay) -> float:
    """Return how many times as fast as the plan another way is."""
    return 1 / _ratio(plan, way)


def _ratio(plan: Plan, way: OtherWay) -> float:
    """Return how many times as fast as another way the plan is."""
    return way.seconds_per_microbatch / (plan.predicted.seconds_per_minibatch / plan.microbatches)
