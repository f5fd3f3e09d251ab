"""What `train` does of the kernels that an estimate was made with."""

from planner.formats.files import replace
from planner.formats.plan import Plan


def as_trained(plan: Plan) -> Plan:
    """Return a plan with stages that `train` compiles where the profile's stack does and the plan
    allows it, and with a note on what it does not run as the stack does; others as they are.
    """
    if plan.stack is None:
        return plan
    from planner.profiler.estimated.stacks import find_stack  # which only estimates need

    stack = find_stack(plan.stack)
    if not stack.fuses_anything:
        return plan
    in_parts = plan.divides_layers or plan.splits_backward
    compiled = not in_parts and not plan.stages[0].shards_gradients
    if compiled:
        plan = replace(plan, compiled=True)
    return plan.noting(stack.untrained_words(plan.chunked_loss, compiled=compiled))
