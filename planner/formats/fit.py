"""The answer of `plan fit`: does a model fit so many GPUs, how is it split, would fewer do."""

import math

from pydantic import PositiveFloat, PositiveInt

from planner.formats.files import Record, replace
from planner.formats.late import LateFailure
from planner.formats.plan import Plan
from planner.formats.shown import Shown

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


class TrainingRun(Record):
    """A whole training, and what an hour of each GPU costs."""

    tokens: PositiveInt
    dollars_per_gpu_hour: PositiveFloat | None = None

    def paid(self, row: "FitRow") -> "FitRow":
        """Return the row with the days and the dollars of the training, as fast as its plan.

        All GPUs are paid, also those that the plan leaves idle.
        """
        if row.plan is None or row.plan.predicted.tokens_per_s is None:
            return row
        hours = self.tokens / row.plan.predicted.tokens_per_s / SECONDS_PER_HOUR
        dollars = None
        if self.dollars_per_gpu_hour is not None:
            dollars = hours * row.gpus * self.dollars_per_gpu_hour
        return replace(row, days=hours / HOURS_PER_DAY, dollars=dollars)


class FitRow(Record):
    """The fastest plan on some number of GPUs, or why there is none; in full for the number that
    was asked about.
    """

    gpus: int
    kinds: str = ""  # of these GPUs, where there may be several: "12 v100 + 4 t4"
    plan: Plan | None
    why_not: str = ""
    hint: str = ""  # at the smallest change that makes a plan fit
    unknown: bool = False  # whether there was too little time to find a plan, or that there is none
    # of the whole training, where it is known how long that is
    days: PositiveFloat | None = None
    dollars: PositiveFloat | None = None

    @property
    def seconds(self) -> float:
        """Seconds per minibatch; infinity without a plan."""
        if self.plan is None:
            return math.inf
        return self.plan.predicted.seconds_per_minibatch


class TrainerRun(Record):
    """A run in the words of another trainer: what it comes to, and a better one in these words."""

    trainer: str = "Megatron"  # whose words these are
    given: Plan  # priced as it is, whether or not it fits the memory
    unknown: tuple[str, ...]  # its options that are not understood, and so not in the price
    remarks: tuple[str, ...] = ()  # on what is priced in another way than the trainer does it
    better: (
        Plan | None
    )  # None where none was found that is faster, or fits where the given does not
    arguments: str | None  # of the better one
    in_script: tuple[str, ...] = ()  # what the script must say of it beside these
    # per minibatch: no plan of the answer's microbatches is faster by the cost model
    bound_s: PositiveFloat | None

    @property
    def speedup(self) -> float | None:
        """Times as fast that the better one is."""
        if self.better is None:
            return None
        return _seconds(self.given) / _seconds(self.better)

    @property
    def most_speedup(self) -> float | None:
        """Times as fast that any plan may be; None where that is not known."""
        if self.bound_s is None:
            return None
        least_s = self.bound_s if self.better is None else min(self.bound_s, _seconds(self.better))
        return max(1.0, _seconds(self.given) / least_s)


def _seconds(plan: Plan) -> float:
    return plan.predicted.seconds_per_minibatch


class Fit(Shown, Record):
    """The answer for the GPUs that were asked about, and for others, the largest first.

    Where a model fits, those are half as many again and again, down to the first number at which it
    does not; where it does not fit, twice as many, up to the first at which it does; as far as
    there is time. Where it is known how long the training is, both, since more GPUs may pay.
    Of several kinds of GPUs, those in place of the fewer ones are each kind's alone.
    """

    model: str
    asked: FitRow
    others: tuple[FitRow, ...]
    # what was not looked at because the time ended: "microbatches of 4, 8"
    not_tried: tuple[str, ...] = ()
    run: TrainingRun | None = None  # that is to be paid
    trainer_run: TrainerRun | None = None  # that was asked about in its trainer's words
    folder: str = ""  # that has profile.json and plan.json
    model_file: str = ""  # as seen from there
    late_failures: tuple[LateFailure, ...] = ()  # which of these files could not be written

    @property
    def rows(self) -> tuple[FitRow, ...]:
        """All numbers of GPUs that were tried, the largest first."""
        return tuple(sorted((self.asked, *self.others), key=lambda row: -row.gpus))

    @property
    def fastest_row(self) -> FitRow | None:
        """The fewest GPUs that train in the least time; None where that is not known."""
        known = [row for row in reversed(self.rows) if row.days is not None]
        return min(known, key=lambda row: row.days or 0.0, default=None)

    @property
    def cheapest_row(self) -> FitRow | None:
        """The GPUs that train for the least money, the faster of equal ones; None where that is not
        known.
        """
        known = [row for row in self.rows if row.dollars is not None]
        return min(known, key=lambda row: row.dollars or 0.0, default=None)

    def paid(self, run: TrainingRun) -> "Fit":
        """Return the answer with what a training takes and costs on each number of GPUs."""
        others = tuple(map(run.paid, self.others))
        return replace(self, asked=run.paid(self.asked), others=others, run=run)
