"""Refuse to divide minibatches of a loss that is not the sum of its parts."""

from __future__ import annotations

from planner.cost.setting import Setting
from planner.errors import InputError
from planner.formats.profile import Profile
from planner.schedule.registry import SCHEDULES


def check_divided_loss(profile: Profile, setting: Setting, *, accepted: bool = False) -> None:
    """Check that the schedule trains on the loss that the model file defines.

    Args:
        profile: says what the loss is a mean over.
        setting: the schedule, and how many microbatches it makes of a minibatch.
        accepted: whether the user takes the mean of the microbatches' losses instead.

    Raises:
        InputError: for a loss of whole batches under a schedule that divides them.
    """
    divided = setting.schedule.divides and setting.microbatches > 1
    if not divided or accepted or profile.loss is None or profile.loss.over != "batch":
        return
    whole = " or ".join(schedule.name for schedule in SCHEDULES if not schedule.divides)
    raise InputError(
        f"the loss of '{profile.model}' is not a mean over samples or labels, so the {setting.microbatches} "
        f"microbatches into which {setting.schedule} divides a minibatch train on another loss",
        hint=f"use `schedule` {whole}; if the loss is a mean over some of the labels, define loss_weight(target) in "
        "the model file and profile it again; or take the mean over microbatches with `accept_divided_loss`",
    )
