"""The answer of `plan fit`: does a model fit so many GPUs, how is it split, would fewer do."""

import math

from planner.formats.files import Record
from planner.formats.late import LateFailure
from planner.formats.plan import Plan
from planner.formats.shown import Shown


class FitRow(Record):
    """The fastest plan on some number of GPUs, or why there is none; in full for the number that
    was asked about.
    """

    gpus: int
    plan: Plan | None
    why_not: str = ""
    hint: str = ""  # at the smallest change that makes a plan fit
    unknown: bool = False  # whether there was too little time to find a plan, or that there is none

    @property
    def seconds(self) -> float:
        """Seconds per minibatch; infinity without a plan."""
        if self.plan is None:
            return math.inf
        return self.plan.predicted.seconds_per_minibatch


class Fit(Shown, Record):
    """The answer for the GPUs that were asked about, and for others, the largest first.

    Where a model fits, those are half as many again and again, down to the first number at which it
    does not; where it does not fit, twice as many, up to the first at which it does; as far as
    there is time.
    """

    model: str
    asked: FitRow
    others: tuple[FitRow, ...]
    # what was not looked at because the time ended: "microbatches of 4, 8"
    not_tried: tuple[str, ...] = ()
    folder: str = ""  # that has profile.json and plan.json
    model_file: str = ""  # as seen from there
    late_failures: tuple[LateFailure, ...] = ()  # which of these files could not be written
