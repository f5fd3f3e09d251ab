"""Replicas of a stage, each of which runs its share of a minibatch's microbatches, or minibatches
in turn.

Which numbers are possible, and how many samples make an update. What replicas cost is in
`planner.cost.models`, the groups that average gradients are made by
`planner.executor.run.build_context`, and exports copy whole pipelines.
"""

from collections.abc import Sequence

from planner.schedule.schedule import Schedule


def most_replicas(schedule: Schedule, microbatches: int, gpus: int) -> int:
    """Return how many replicas of a stage so many GPUs can run, each with at least one microbatch.

    Others would idle, or the minibatch would have to grow.
    """
    if not schedule.divides:
        return gpus
    return min(gpus, microbatches)


def samples_per_update(
    schedule: Schedule,
    microbatches: int,
    microbatch_size: int | None,
    replicas: Sequence[int],
) -> tuple[int, int]:
    """Return how many samples' gradients make an update, at the stage of the fewest and at that of
    the most.

    They are those of a minibatch, except under 1f1b: there, a stage updates after a minibatch on
    each of its replicas. Counted in microbatches where the size of these is not known.
    """
    size = microbatch_size or 1
    if schedule.divides:
        return microbatches * size, microbatches * size
    return min(replicas) * size, max(replicas) * size


def update_words(samples: tuple[int, int], microbatch_size: int | None) -> str:
    """Write samples per update: "128 samples", "4 to 28 samples"; or microbatches where their size
    is not known.
    """
    least, most = samples
    numbers = f"{most}" if least == most else f"{least} to {most}"
    if microbatch_size is not None:
        return f"{numbers} sample{'s' * (most > 1)}"
    return f"{numbers} microbatch{'es' * (most > 1)}"
