"""Watch, while training, whether devices and links are what the plan was solved for.

    worker 0..n   records some minibatches of each window           `WindowSampler`
                  a thread tells them to worker 0, in the store
    worker 0      the same thread compares them with the simulation  `DriftJudge`
                  where they part for long, a process of its own solves again

No worker waits for any of it: windows that worker 0 has not read in time are left out, and so are
those that pass while it is solved again, which takes time from the workers of that host.
"""

import json
import logging
import math
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

# PyTorch exports both by a star import.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import InputError, PlannerError, first_line
from planner.executor.observe.recording import clock_offsets
from planner.executor.observe.window_sampler import WindowNotes, WindowSampler
from planner.executor.run.drift_lines import DriftLines
from planner.executor.run.solver_process import SolverProcess
from planner.formats.drift import Corrected, Drift, RouteDrift, WorkerDrift, plan_words
from planner.formats.files import Record, load_record, replace
from planner.formats.held_folder import held_folder
from planner.formats.plan import save_plan
from planner.formats.timeline import Event, Events, Timeline, save_timeline
from planner.plan.left_out import left_out
from planner.simulator.drift import (
    LOOKS,
    DriftJudge,
    DriftLimits,
    Expectation,
    Parting,
    Window,
)
from planner.workers.meeting import nth_time, worker_store
from planner.workers.secret_store import Part, record_in
from planner.workers.watch import own_keys

if TYPE_CHECKING:
    from planner.executor.run.context import PipelineContext

ANSWER = "answer.json"  # a `Corrected`, in the folder of a question
LONGER = "longer.json"  # a question's, too; see `Corrected.longer`
LEFT_OUT = "left-out.json"  # a question's, too: ratios by rank; see `LeftOut`
_KEPT = 8  # halves of a worker in the store: the next one takes the place of the oldest
_LOOKS_EVERY_S = 0.5
_CONNECT = timedelta(seconds=60)
_JOIN_S = 5.0
_FOUND = "found"
_LIMITS = DriftLimits()
_NEWEST = 2 * LOOKS  # halves of windows that are solved for
_log = logging.getLogger(__name__)


class Told(Record):
    """What one worker recorded of a window, as it tells worker 0."""

    number: int
    first: int
    end: int
    host: str
    seconds: float
    events: tuple[Event, ...]

    @classmethod
    def of(cls, notes: WindowNotes) -> "Told":
        """Return what to tell of a window."""
        # What a worker noted itself needs no check, which would take longer than all the rest.
        return cls.model_construct(
            number=notes.number,
            first=notes.first,
            end=notes.end,
            host=socket.gethostname(),
            seconds=notes.seconds,
            events=tuple(notes.events),
        )


class LeftOut(Record):
    """What a worker that the plan leaves out measured last, as it tells worker 0."""

    number: int  # of the window
    host: str
    ratio: float | None  # seconds of its computations, relative to the plan's, if it measured them


class DriftListener(Protocol):
    """Who is told on worker 0, by the thread that watches."""

    @property
    def longer(self) -> Mapping[str, float]:
        """By layer, how many times as long as profiled it took when the plan was solved."""

    def consider(self, drift: Drift, answer: Corrected | None, *, clear: bool) -> None: ...
    def look(self, end: int, samples_per_s: float) -> None: ...


class DriftWatch:
    """This worker's part; worker 0 judges. All workers make theirs together."""

    def __init__(
        self,
        context: "PipelineContext",
        listener: DriftListener | None = None,
    ) -> None:
        self._plan = context.job.plan
        self._options = context.job.drift
        self._rank = context.rank
        self._minibatch_size = context.minibatch_size
        self._listener = listener
        self.found: list[Drift] = []  # on worker 0
        self._lines = DriftLines(LOOKS)

        store = connection()
        self._store = Part(f"drift/{nth_time(store, 'drift')}", store)
        self._offsets = clock_offsets()
        self.sampler = WindowSampler(
            context.rank,
            context.place.compute,
            math.lcm(*context.shape.replicas),
            self._hand_over,
            max(1, self._options.drift_window // LOOKS),
        )
        self._judge: DriftJudge | None = None
        if self._rank == 0:
            self._judge = self._made_judge()
        self._due: deque[int] = deque()  # windows that worker 0 has told, and not judged
        self._undisturbed_from = 0  # window, since it was solved again
        self._judged: deque[Window] = deque(maxlen=_NEWEST)
        self._hosts: dict[int, str] = {}
        # by rank, of workers that are left out: the newest ratio, and the number of its window
        self._left_out: dict[int, float] = {}
        self._told_last: dict[int, int] = {}
        self._queue: queue.SimpleQueue[WindowNotes | LeftOut | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._solver: SolverProcess | None = None
        if self._judge is not None and self._options.profile is not None:
            # A run that may move has one ready; others ask seldom; nothing waits for them.
            self._solver = SolverProcess(self._options.profile, ready=listener is not None)

        self._thread = threading.Thread(target=self._run, name="drift watch", daemon=True)
        self._thread.start()

    def _made_judge(self) -> DriftJudge | None:
        try:
            return DriftJudge(Expectation.of(self._plan), _LIMITS, 1 / LOOKS)
        except InputError as error:
            _log.warning("the run is not compared with its plan: %s", error.message)
            return None

    def window_at(self, minibatch: int) -> int:
        """Return the number of the window that a minibatch is in."""
        return minibatch // self.sampler.window

    @property
    def newest(self) -> Drift | None:
        """What was found last, on every worker; None where nothing was."""
        if not self._store.check([_FOUND]):
            return None
        return record_in(self._store.get(_FOUND), _FOUND, Drift)

    def finish(self) -> None:
        """End the watch with the run; what is being solved is given up."""
        self._ending.set()
        self._queue.put(None)
        if self._solver is not None:
            self._solver.end()
        self._thread.join(_JOIN_S)

    # In the thread that trains

    def _hand_over(self, notes: WindowNotes) -> None:
        self._queue.put(notes)

    def tell_left_out(self, number: int, ratio: float | None) -> None:
        """Take note of what this worker, which the plan leaves out, measured towards the end of a
        window; None where it had no time to measure.
        """
        self._queue.put(LeftOut(number=number, host=socket.gethostname(), ratio=ratio))

    # In the thread that watches

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._tell_next()
                if self._judge is not None:
                    self._judge_all_told(self._judge)
        except Exception as error:
            # Training does not depend on it. A store that is lost ends the run from elsewhere.
            if not self._ending.is_set():
                _log.warning(
                    "whether the run keeps to its plan is not watched any more: %s",
                    first_line(error),
                )

    def _tell_next(self) -> None:
        try:
            notes = self._queue.get(timeout=_LOOKS_EVERY_S if self._due else None)
        except queue.Empty:
            return

        if notes is None:
            return
        if isinstance(notes, LeftOut):
            self._store.set(_left_out_key(self._rank), notes.model_dump_json())
        else:
            told = Told.of(notes)
            self._store.set(self._key(self._rank, notes.number), told.model_dump_json())

        if self._judge is not None:
            self._due.append(notes.number)

    def _key(self, rank: int, number: int) -> str:
        return f"{rank}/{number % _KEPT}"

    def _judge_all_told(self, judge: DriftJudge) -> None:
        while self._due and not self._ending.is_set():
            told = self._all_told(self._due[0])
            if told is None:
                return
            number = self._due.popleft()
            if told and number >= self._undisturbed_from:
                self._look(judge, told)

    def _all_told(self, number: int) -> list[Told] | None:
        """Return what all workers with stages told of a window, in the order of their ranks:
        nothing where some are past it; None where some have not told it yet.
        """
        keys = [self._key(rank, number) for rank in self._ranks]
        if not self._store.check(keys):
            return None
        values = self._store.multi_get(keys)
        told = [record_in(text, key, Told) for text, key in zip(values, keys, strict=True)]
        if any(each.number < number for each in told):
            return None
        return told if all(each.number == number for each in told) else []

    def _look(self, judge: DriftJudge, told: Sequence[Told]) -> None:
        """Judge a window, and tell what parted from the plan, or that nothing does any more."""
        self._hosts |= {rank: each.host for rank, each in zip(self._ranks, told, strict=True)}
        window = self._window(told)
        self._judged.append(window)

        parting = judge.look(window)
        if parting is None:
            found = self._lines.passed()
        else:
            drift, answer = self._answered(parting)
            found = self._lines.found(drift)
            if self._listener is not None:
                self._listener.consider(drift, answer, clear=parting.clear)

        if found is not None:
            self._tell_all(found)
        if self._listener is not None:
            self._listener.look(window.end, window.samples_per_s)

    @property
    def _ranks(self) -> list[int]:
        """The workers with stages, in the order in which they are told."""
        return sorted(self._plan.ranks)

    def _window(self, told: Sequence[Told]) -> Window:
        """Return what all workers told of a window, by the clock of worker 0."""
        events = []
        for rank, each in zip(self._ranks, told, strict=True):
            offset_s = self._offsets[rank]
            events += [
                event._replace(start_s=event.start_s + offset_s, end_s=event.end_s + offset_s)
                for event in each.events
            ]

        first = told[0]
        samples = (first.end - first.first) * self._minibatch_size
        return Window(first.first, first.end, events, samples / first.seconds, self._news())

    def _news(self) -> dict[int, float]:
        """Return what workers that are left out measured since the window before, by rank."""
        news = {}
        for rank in left_out(self._plan, dist.get_world_size()):
            key = _left_out_key(rank)
            if not self._store.check([key]):
                continue
            told = record_in(self._store.get(key), key, LeftOut)
            self._hosts[rank] = told.host
            if told.ratio is not None and told.number != self._told_last.get(rank):
                news[rank] = told.ratio
                self._left_out[rank] = told.ratio
            self._told_last[rank] = told.number

        return news

    def _tell_all(self, drift: Drift) -> None:
        self.found.append(drift)
        self._store.set(_FOUND, drift.model_dump_json())
        _log.warning("%s", drift)

    def _answered(self, parting: Parting) -> tuple[Drift, Corrected | None]:
        """Return what parted, and what solving again answered."""
        drift = self._drift_of(parting)
        try:
            answer = self._solved_again(parting.since)
        except PlannerError as error:
            return replace(drift, why_not=error.message), None

        drift = replace(drift, expected_samples_per_s=self._minibatch_size / answer.expected_s)
        if answer.better is None:
            return drift, answer

        better_s = answer.better.predicted.seconds_per_minibatch
        drift = replace(
            drift,
            better_config=plan_words(answer.better),
            better_samples_per_s=self._minibatch_size / better_s,
        )
        return drift, answer

    def _drift_of(self, parting: Parting) -> Drift:
        """Return what parted, without what another plan would give."""
        stages: dict[int, int] = {}  # by rank, its first one
        for number, stage in enumerate(self._plan.stages):
            for rank in stage.ranks:
                stages.setdefault(rank, number)

        workers = tuple(
            WorkerDrift(rank=rank, stage=stages.get(rank), host=self._hosts[rank], ratio=ratio)
            for rank, ratio in sorted(parting.workers.items())
        )
        routes = tuple(
            RouteDrift(ranks=ranks, ratio=ratio) for ranks, ratio in sorted(parting.routes.items())
        )
        newest = self._judged[-1]
        return Drift(
            since=parting.since,
            seen=newest.end,
            workers=workers,
            routes=routes,
            config=plan_words(self._plan),
            planned_samples_per_s=self._minibatch_size / self._plan.predicted.seconds_per_minibatch,
            measured_samples_per_s=newest.samples_per_s,
        )

    def _solved_again(self, since: int) -> Corrected:
        """Ask another process, which solves for what was measured; raise PlannerError without an
        answer.
        """
        if self._solver is None:
            raise PlannerError("the run was given no `profile`")
        with held_folder("drift") as folder:
            save_plan(self._plan, folder / "plan.json")
            save_timeline(self._timeline(since), folder / "run.json")
            longer = {} if self._listener is None else dict(self._listener.longer)
            (folder / LONGER).write_text(json.dumps(longer), encoding="utf-8")
            (folder / LEFT_OUT).write_text(json.dumps(self._left_out), encoding="utf-8")
            try:
                self._solver.answer(folder)
            finally:
                self._undisturbed_from = self.sampler.number + 1
            if self._ending.is_set():
                raise PlannerError("the run ended before")
            return load_record(Corrected, folder / ANSWER, InputError, "solve again by hand")

    def _timeline(self, since: int) -> Timeline:
        """Return as a run what was recorded of the newest windows since something parted."""
        events = [
            event for window in self._judged for event in window.events if event.minibatch >= since
        ]
        start_s = min(event.start_s for event in events)
        moved = [
            event._replace(start_s=event.start_s - start_s, end_s=event.end_s - start_s)
            for event in events
        ]
        end = self._judged[-1].end
        return Timeline.of_plan(self._plan, "measured", end, Events.of(moved))


def _left_out_key(rank: int) -> str:
    return f"left-out/{rank}"


def watch_of(
    context: "PipelineContext", listener: DriftListener | None = None
) -> DriftWatch | None:
    """Return the watch over a run; None where it is turned off, or the plan expects nothing. All
    workers call it.
    """
    job = context.job
    if job.drift.drift_window == 0 or job.baseline is not None:
        return None
    if any(stage.forward_s == 0 for stage in job.plan.stages):
        return None
    return DriftWatch(context, listener)


def connection() -> Store:
    """Return a connection of the watch's own, because others may wait in theirs."""
    # Alone, nobody waits; and a script may have met the others by means of its own.
    if dist.get_world_size() == 1 or "MASTER_PORT" not in os.environ:
        return worker_store(_CONNECT)
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return own_keys(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT))
