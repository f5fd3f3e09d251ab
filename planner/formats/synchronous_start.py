"""The first minibatches of an asynchronous training, trained as a synchronous schedule trains them.

Late gradients do most harm while weights move fastest, at the beginning.
"""

from __future__ import annotations

from planner.formats.plan import Plan
from planner.schedule.schedule import PipelineShape

_PARTS_PER_STAGE = 2  # microbatches of a minibatch: the pipeline idles for a third of the time, or less


def synchronous_part(plan: Plan) -> Plan:
    """Return an asynchronous plan with the same stages and minibatches, which drains after every minibatch.

    Minibatches that the plan does not divide are divided into up to two microbatches per stage, as many as divide its
    samples evenly. Times of a microbatch are taken to shrink in proportion; small ones take longer than that on a GPU.
    """
    schedule = plan.schedule.drained
    parts = 1 if plan.schedule.divides else _parts(plan.microbatch_size or 1, _PARTS_PER_STAGE * len(plan.stages))
    microbatches = plan.microbatches * parts
    ranks = tuple(stage.ranks for stage in plan.stages)
    shape = PipelineShape(ranks, (), schedule, microbatches)
    stages = [
        stage.model_copy(
            update={
                "in_flight": shape.in_flight(number),
                "forward_s": stage.forward_s / parts,
                "backward_s": stage.backward_s / parts,
                "recompute_s": None if stage.recompute_s is None else stage.recompute_s / parts,
                "ready_s": tuple(seconds / parts for seconds in stage.ready_s),
            }
        )
        for number, stage in enumerate(plan.stages)
    ]
    transfers = [
        each.model_copy(
            update={"output_bytes": each.output_bytes // parts, "gradient_bytes": each.gradient_bytes // parts}
        )
        for each in plan.transfers
    ]
    size = None if plan.microbatch_size is None else plan.microbatch_size // parts
    changes = {"microbatch_size": size, "microbatches": microbatches, "schedule": schedule}
    return plan.model_copy(update={**changes, "stages": tuple(stages), "transfers": tuple(transfers)})


def synchronous_minibatches(start: float, minibatches: int) -> int:
    """Return the length of a synchronous start of `start`, a share below 1 or a number of minibatches."""
    return round(start * minibatches) if start < 1 else min(int(start), minibatches)


def _parts(samples: int, most: int) -> int:
    return max(parts for parts in range(1, most + 1) if samples % parts == 0)
