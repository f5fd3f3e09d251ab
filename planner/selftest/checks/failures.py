"""When a worker fails in the middle of a run, is the right cause told soon, and is nothing left running?"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from planner.errors import PlannerError
from planner.options.training import RunOptions
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.selftest.lab import Lab, even_plan, location
from planner.selftest.models.failing import FAULT, MARK
from planner.selftest.rows import Case, Check, Outcome, judged
from planner.workers.launch import environment

LIMIT_S = 10.0
STEPS = 10_000  # more than a run reaches before it fails
MODEL, BATCH_SIZE = location("failing"), 4
# What the message must name, by the fault that the model injects.
CAUSES: Mapping[str, tuple[str, ...]] = {
    "exception": ("worker 0 (stage 0)", "injected by the self-test"),
    "out of memory": ("worker 0 (stage 0)", "memory"),
    "nan": ("nan",),
    "killed": ("worker 0 (stage 0)", "SIGKILL"),
}


def _cases(lab: Lab) -> Iterator[Case]:
    for fault in CAUSES:
        yield Case(fault, partial(_fault, lab, fault))


def _fault(lab: Lab, fault: str) -> Outcome:
    plan = even_plan(lab.profile(MODEL, BATCH_SIZE), ONE_F_ONE_B, (1,) * lab.workers)
    mark = lab.folder / f"fault-{fault.replace(' ', '-')}"
    with environment({FAULT: fault, MARK: str(mark)}):
        try:
            lab.train(MODEL, plan, STEPS, run_options=RunOptions(stop_on_nan=True))
        except PlannerError as error:
            told_s = time.time()
            return judge(fault, error.message, told_s - _time_of_fault(mark), processes_with(str(mark)))
    return judged(False, "the run ended as if nothing had happened")


def judge(fault: str, message: str, seconds: float, left: int) -> Outcome:
    """Judge what was told of a fault, how soon, and how many processes are left."""
    first = message.splitlines()[0]
    missing = [words for words in CAUSES[fault] if words.lower() not in message.lower()]
    if missing:
        return judged(False, f"the message does not name '{missing[0]}': {first}")
    if left:
        return judged(False, f"{left} processes are left running after: {first}")
    return judged(seconds <= LIMIT_S, f"told after {seconds:.1f} s (limit {LIMIT_S:g} s): {first}", seconds, LIMIT_S)


def _time_of_fault(mark: Path) -> float:
    """Return when the model failed; a run that fails before that fails the case with what it says."""
    return float(mark.read_text(encoding="utf-8")) if mark.exists() else time.time()


def processes_with(text: str) -> int:
    """Count the other processes of this user that have `text` in their environment; 0 where the system has no /proc."""
    others = [process for process in Path("/proc").glob("[0-9]*") if process.name != str(os.getpid())]
    return sum(text.encode() in _environment_of(process) for process in others)


def _environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # of another user, or just ended
        return b""


CHECK = Check("failures", "is the right cause told soon, and is nothing left running?", _cases)
