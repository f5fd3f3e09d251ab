"""A minibatch of so many samples, counted in the microbatches of a profile."""

from __future__ import annotations

from planner.errors import InputError
from planner.formats.profile import Profile
from planner.schedule.schedule import Schedule


class MinibatchError(InputError):
    """A minibatch that a profile's microbatches or a schedule cannot make."""


def microbatches_in(minibatch: int, profile: Profile, schedule: Schedule) -> int:
    """Return how many microbatches make a minibatch of so many samples.

    Raises:
        InputError: where they do not divide it, or the schedule does not divide minibatches.
    """
    size = profile.microbatch_size
    if size is None:
        raise InputError(
            f"the profile of '{profile.model}' does not know its batch size, so `minibatch={minibatch}` is no number "
            "of its microbatches",
            hint="give `microbatches`",
        )
    count, rest = divmod(minibatch, size)
    if rest or count < 1:
        raise MinibatchError(
            f"`minibatch={minibatch}` is no multiple of the {size} samples of a microbatch",
            hint=f"give `minibatch={max(1, count) * size}`, or a profile with another `batch_size`",
        )
    if count > 1 and not schedule.divides:
        raise MinibatchError(
            f"under {schedule} a minibatch has the {size} samples that were profiled, not `minibatch={minibatch}`",
            hint=f"profile with `batch_size={minibatch}`, or use a `schedule` that divides minibatches",
        )
    return count
