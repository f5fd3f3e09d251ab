"""Decide whether a run moves to another plan, and let all workers end the old one at one minibatch.

    gain = (seconds per minibatch of this plan - those of the other one) x minibatches that are left
    cost = seconds that training stands still: of the last move, or of the start of the run

A move must gain `replan_gain` times what it costs, and after one the next is at least ten times its
cost away. It must also gain more than predictions err by: it waits while the run is not as fast as
is expected of its own plan, to within that gain.

What is clear beside the noise of the windows before, and has lasted as long as a move takes, is
decided at once. All else is decided two windows later, if the run has not come back to its plan by
then.

Worker 0 decides beside training. Several times in a window every worker asks the store whether the
plan ends there: the first to ask, or worker 0, settles it for all. A worker that the plan leaves
out does not ask, because nothing keeps it at the pace of the others: it waits for what they settle.

A worker that was taken in again and soon left out again looked faster while it had nothing to do.
So each time it takes twice as many windows more until it is taken in.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

# PyTorch exports it by a star import.
from torch.distributed import Store  # type: ignore[attr-defined]

from planner.executor.run.context import PipelineContext
from planner.executor.run.drift_watch import connection
from planner.formats.drift import Corrected, Drift, Move, plan_words
from planner.formats.plan import Plan
from planner.plan.left_out import why_nobody
from planner.plan.rank_groups import sample_parts
from planner.simulator.drift import LOOKS
from planner.units import format_seconds
from planner.workers.job import Job
from planner.workers.meeting import nth_time
from planner.workers.secret_store import Part, record_in

_REST = 10  # times the cost of a move, until the next one
_POINTS = 5  # of a window, at which a plan may end
# Halves of windows after which a plan is still to be better: what was only noise is told of by
# then.
_CONFIRMED = 2 * LOOKS
_LOOKS_EVERY_S = 0.05  # for what others settle
_GOES_ON = "go"
_ENDS = "move"
_log = logging.getLogger(__name__)


class _Better(NamedTuple):
    """A plan that would be faster, and by how much."""

    plan: Plan
    longer: Mapping[str, float]  # layers
    saved_s: float  # per minibatch
    expected_samples_per_s: float  # of the plan that is run
    samples_per_s: float

    def gains_more_than_errors(self, measured_samples_per_s: float) -> bool:
        """Return whether the plan would gain more than the prediction of the run's plan errs by."""
        error = abs(measured_samples_per_s / self.expected_samples_per_s - 1)
        return self.samples_per_s / self.expected_samples_per_s - 1 > error


class Replanner:
    """One worker's part in changing the plan of a run; it outlives the plans."""

    def __init__(self, job: Job, rank: int, minibatches: int, store: Store) -> None:
        self.moves: list[Move] = []
        self._plan = job.plan
        self._gain = job.drift.replan_gain
        self._rank = rank
        self._workers = job.plan.workers  # of the run, all of which have stages at its start
        self._times_left_out = 0  # moves that left out a worker
        self.every = max(1, job.drift.drift_window // _POINTS)  # minibatches between two points
        self._minibatches = minibatches
        self._cost_s = math.inf  # not known yet
        self._rests_until_s = 0.0
        self._better: _Better | None = None
        self._unconfirmed = 0  # halves of windows that are to pass before the decision
        self._decided = False
        self._store = store
        # By layer, how many times as long as profiled it took when the plan was solved: on
        # worker 0.
        self.longer: Mapping[str, float] = {}
        self._longer_next: Mapping[str, float] = {}

    @classmethod
    def of(cls, context: PipelineContext) -> "Replanner | None":
        """Return what changes the plan of a run; None where it is to keep its plan."""
        job = context.job
        if not job.drift.replan or job.baseline is not None:
            return None
        store = connection()
        own = Part(f"replan/{nth_time(store, 'replan')}", store)
        return cls(job, context.rank, context.minibatches, own)

    def expect_cost(self, seconds: float) -> None:
        """Note how long a move would take: the first as long as the start of the run."""
        self._cost_s = seconds

    # In the thread that watches, of worker 0

    def consider(self, drift: Drift, answer: Corrected | None, *, clear: bool) -> None:
        """Take note of a plan that would be faster on what was measured last, or of none; `clear`
        beside noise.
        """
        self._better = None
        better = None if answer is None else answer.better
        if answer is None or better is None or drift.expected_samples_per_s is None:
            return
        if obstacle := self._obstacle(better):
            _log.warning("the run does not move to %s: %s", plan_words(better), obstacle)
            return

        assert drift.better_samples_per_s is not None
        samples = drift.planned_samples_per_s * self._plan.predicted.seconds_per_minibatch
        lasted_s = (drift.seen - drift.since) * samples / drift.measured_samples_per_s
        saved_s = samples / drift.expected_samples_per_s - samples / drift.better_samples_per_s
        self._better = _Better(
            better,
            answer.longer,
            saved_s,
            drift.expected_samples_per_s,
            drift.better_samples_per_s,
        )
        self._unconfirmed = _CONFIRMED
        if clear and lasted_s >= self._cost_s:
            self._unconfirmed = 0
        if better.workers > self._plan.workers:
            self._unconfirmed += _CONFIRMED * (2 ** max(0, self._times_left_out - 1) - 1)

    def look(self, end: int, samples_per_s: float) -> None:
        """Decide, after half a window that ended with minibatch `end`, whether to move.

        Args:
            end: minibatch.
            samples_per_s: that were trained in it.
        """
        if self._better is None or self._decided:
            return
        if self._unconfirmed > 0:
            self._unconfirmed -= 1
            return
        if time.monotonic() < self._rests_until_s:
            return
        if not self._better.gains_more_than_errors(samples_per_s):
            return
        plan, saved_s = self._better.plan, self._better.saved_s
        longer = self._better.longer
        self._better = None
        left = self._minibatches - end
        pays = left * saved_s >= self._gain * self._cost_s
        _log.warning(
            "%s would save %s of what is left of the run, and moving costs about %s: the run %s, "
            "because a move pays from %g times its cost on (`replan_gain`)",
            plan_words(plan),
            format_seconds(left * saved_s),
            format_seconds(self._cost_s),
            "moves" if pays else "does not move",
            self._gain,
        )
        if pays:
            self._longer_next = longer
            self._settle(plan, end)

    def _settle(self, plan: Plan, end: int) -> None:
        self._store.set(self._key("plan"), plan.model_dump_json())
        first = (end // self.every + 1) * self.every
        for point in range(first, self._minibatches, self.every):
            if self._store.compare_set(self._key(point), "", _ENDS) == _ENDS.encode():
                self._decided = True
                return

    def _obstacle(self, better: Plan) -> str:
        """Return why the workers cannot move to a plan; "" where they can."""
        if not better.ranks <= set(range(self._workers)):
            return f"it needs more than the {self._workers} workers of the run"
        why = why_nobody(better)
        if why and better.workers < self._workers:
            return f"it has work for {better.workers} of {self._workers} workers, and {why}"
        if sample_parts(better) != sample_parts(self._plan):
            return "its minibatches have other samples"
        return ""

    # In the thread that trains, of all workers

    def ends_at(self, minibatch: int) -> bool:
        """Return whether the plan ends before a minibatch; the same on all workers."""
        if minibatch % self.every:
            return False
        return self._store.compare_set(self._key(minibatch), "", _GOES_ON) == _ENDS.encode()

    def points(self, first: int, end: int) -> range:
        """Return the minibatches between two, before which the plan may end."""
        return range((first // self.every + 1) * self.every, end, self.every)

    def tell_done(self, end: int) -> None:
        """Tell workers that are left out that this one has trained all minibatches before `end`."""
        if self._plan.workers < self._workers and self._rank == min(self._plan.ranks):
            self._store.set(self._key(f"done/{end}"), _GOES_ON)

    def await_done(self, end: int) -> None:
        """Wait, on a worker that is left out, until others have trained all minibatches before
        `end`.
        """
        self._await(self._key(f"done/{end}"))

    def is_settled(self, minibatch: int) -> bool:
        """Return whether others have settled if the plan ends before a minibatch."""
        return self._store.check([self._key(minibatch)])

    def await_ending(self, minibatch: int) -> bool:
        """Wait, on a worker that is left out, until others have settled whether the plan ends
        before a minibatch, and return it.
        """
        return self._await(self._key(minibatch)) == _ENDS.encode()

    def _await(self, key: str) -> bytes:
        # For as long as it takes: whether others hang is judged by their heartbeats.
        while not self._store.check([key]):
            time.sleep(_LOOKS_EVERY_S)
        return self._store.get(key)

    def next_plan(self) -> Plan:
        """Return the plan that comes after the one that has ended."""
        key = self._key("plan")
        return record_in(self._store.get(key), key, Plan)

    def moved(self, plan: Plan, minibatch: int, seconds: float) -> None:
        """Note that the run goes on under another plan, after so many seconds without training."""
        move = Move(
            minibatch=minibatch,
            before=plan_words(self._plan),
            after=plan_words(plan),
            seconds=seconds,
            drained=self._plan.schedule.asynchronous,
            left_out=tuple(sorted(self._plan.ranks - plan.ranks)),
            taken_in=tuple(sorted(plan.ranks - self._plan.ranks)),
        )
        self.moves.append(move)
        self._times_left_out += bool(move.left_out)
        self._plan = plan
        self.longer = self._longer_next
        self._decided = False
        self._cost_s = seconds
        self._rests_until_s = time.monotonic() + _REST * seconds
        if self._rank == 0:
            _log.warning("%s", move)

    def stays(self, why: str) -> None:
        """Note that a move failed, and go on under the same plan for good."""
        self._decided = True
        if self._rank == 0:
            _log.warning("the run keeps its plan, because its state cannot be moved: %s", why)

    def _key(self, what: object) -> str:
        return f"{len(self.moves)}/{what}"
