"""Workers that a plan leaves out, because their devices are too slow to be worth a place.

Such a worker measures its device, so that it can be taken in again: see
`planner.executor.run.left_out`.
"""

from planner.formats.plan import Plan


def left_out(plan: Plan, workers: int) -> tuple[int, ...]:
    """Return those of the ranks of a run that have no stage under a plan."""
    return tuple(sorted(set(range(workers)) - plan.ranks))


def why_nobody(plan: Plan) -> str:
    """Return why a plan that leaves out workers cannot be trained; "" where it can.

    A worker that is left out measures a stage by itself, and compares its seconds with the plan's.
    """
    if plan.ranks_per_replica > 1:
        return "its ranks shard layers"
    if plan.stages[0].shards_gradients:
        return "its replicas shard gradients or weights"
    if plan.lengths is not None:
        return "the lengths of its batches vary"
    if len({kind.name for kind in plan.cluster.kinds}) > 1:
        return "its devices are of several kinds"
    return ""


def measured_stage(plan: Plan) -> int:
    """Return the stage that a worker without stages measures its device with: the cheapest one."""
    seconds = [stage.forward_s + stage.backward_s for stage in plan.stages]
    return seconds.index(min(seconds))


def expected_s(plan: Plan, rank: int) -> float:
    """Return the seconds of a microbatch in that stage, forward and backward, on the device of a
    worker as the plan knows it.

    The plan's seconds are those of the slowest of the stage's devices.
    """
    stage = plan.stages[measured_stage(plan)]
    seconds = stage.forward_s + stage.backward_s
    if not plan.cluster.kinds:
        return seconds
    slowest = min(plan.cluster.kind_of(each).speed for each in stage.ranks)
    return seconds * slowest / plan.cluster.kind_of(rank).speed
