"""What is odd about a plan that uses little of its GPUs' peak."""

from planner.analysis.limits import Limits
from planner.formats.plan import Plan
from planner.units import counted

# Of the peak, by the model's own FLOPs. Trainings that are published use 15% to 60%.
LITTLE_OF_THE_PEAK = 0.10
MUCH_IDLE = 0.5  # of the workers' time, without computation


def little_use_words(plan: Plan, limits: Limits | None) -> str | None:
    """Say that the plan uses little of the GPUs' peak, and what takes the time instead; None where
    it uses more, or where that is not known.
    """
    used = plan.predicted.flop_utilisation
    if used is None or used >= LITTLE_OF_THE_PEAK:
        return None
    return f"the plan uses {used:.1%} of the GPUs' peak, which is little: {_why(plan, limits)}"


def _why(plan: Plan, limits: Limits | None) -> str:
    """Say what the workers do with their time."""
    if limits is None:
        return "its time was not simulated, so what it waits for is not known"
    if limits.bubble >= MUCH_IDLE:
        idle = f"workers are idle {limits.bubble:.0%} of the time"
        busiest = f"{limits.place}, is busy {limits.share:.0%} of it"
        return f"{idle}; what limits them, {busiest}; {_few_microbatches(plan)}"

    size = counted(plan.microbatch_size or 1, "sample")
    return (
        f"workers compute {1 - limits.bubble:.0%} of the time, in operations that are small or "
        f"move more than they multiply, with microbatches of {size}"
    )


def _few_microbatches(plan: Plan) -> str:
    """Say how many microbatches there are for the stages, of which a larger minibatch has more."""
    ending = "es" if plan.microbatches > 1 else ""
    microbatches = f"{plan.microbatches} microbatch{ending}"
    return f"a minibatch has {microbatches} for {counted(plan.workers, 'GPU')}"
