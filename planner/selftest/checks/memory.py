"""Is the predicted memory of a stage what its worker measures, and never less?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from planner.schedule.flush import FLUSH
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule
from planner.selftest.lab import Lab, even_plan, location
from planner.selftest.rows import Case, Check, Outcome, judged
from planner.units import format_bytes
from planner.workers.job import WorkerReport
from planner.workers.launch import environment

LIMIT = 0.10
STEPS = 8
MODEL, BATCH_SIZE = location("transformer", "build_model"), 32
# glibc keeps what is freed, and what it keeps in fragments does not depend on the plan. A worker that gives blocks back
# has the size of what it uses.
PAGES_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def _cases(lab: Lab) -> Iterator[Case]:
    for schedule in (FLUSH, ONE_F_ONE_B):
        yield Case(f"{schedule}", partial(_memory, lab, schedule))


def _memory(lab: Lab, schedule: Schedule) -> Outcome:
    plan = even_plan(lab.profile(MODEL, BATCH_SIZE), schedule, (1,) * lab.workers)
    with environment(PAGES_RETURNED):
        result = lab.train(MODEL, plan, STEPS)
    return judge(result.reports)


def judge(reports: tuple[WorkerReport, ...]) -> Outcome:
    """Judge the worker that is furthest from its prediction."""
    errors = {report.rank: report.predicted_memory_bytes / report.peak_memory_bytes - 1 for report in reports}
    text = ", ".join(_in_words(report, errors[report.rank]) for report in reports)
    low, high = min(errors.values()), max(errors.values())
    good = low >= 0 and high <= LIMIT
    return judged(good, f"{text}; limits 0 and {LIMIT:+.0%}", low if low < 0 else high, LIMIT)


def _in_words(report: WorkerReport, error: float) -> str:
    predicted, measured = format_bytes(report.predicted_memory_bytes), format_bytes(report.peak_memory_bytes)
    reserved = (
        "" if report.reserved_memory_bytes is None else f", {format_bytes(report.reserved_memory_bytes)} reserved"
    )
    return f"worker {report.rank}: {predicted} predicted, {measured} measured ({error:+.1%}){reserved}"


CHECK = Check("memory", "is the predicted memory that of the workers?", _cases)
