"""Does a plan of one stage train as fast as a plain loop?

A process runs both in turn, in many short pairs, so that what else the machine does falls on both alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.selftest.lab import Lab, even_plan, location
from planner.selftest.rows import Case, Check, Outcome, judged
from planner.selftest.workers.one_stage import Pairs, measure_pairs
from planner.units import format_seconds

LIMIT = 0.97  # of the plain loop's throughput
MODELS = {"convolutional": ("build_wide", 8, 256), "transformer": ("build_model", 4, 64)}
PAIRS, TRIES = 30, 2


def _cases(lab: Lab) -> Iterator[Case]:
    for name, (builder, on_cpu, on_cuda) in MODELS.items():
        yield Case(name, partial(_throughput, lab, location(name, builder), on_cuda if lab.cuda else on_cpu))


def _throughput(lab: Lab, model: str, batch_size: int) -> Outcome:
    plan = even_plan(lab.profile(model, batch_size), ONE_F_ONE_B, (1,))
    for number in range(TRIES):
        outcome = judge(measure_pairs(lab, model, plan, pairs=PAIRS * (number + 1), steps=2))
        if outcome.result == "passed":
            break
    return outcome


def judge(pairs: Pairs) -> Outcome:
    """Judge the median of the pairs' ratios."""
    ratio = median(plain / ours for plain, ours in zip(pairs.plain_s, pairs.pipeline_s, strict=True))
    text = (
        f"{ratio:.1%} of a plain loop's throughput (limit {LIMIT:.0%}): a step takes "
        f"{format_seconds(median(pairs.pipeline_s))}, and {format_seconds(median(pairs.plain_s))} in a plain loop"
    )
    return judged(ratio >= LIMIT, text, ratio, LIMIT)


CHECK = Check("throughput", "is a plan of one stage as fast as a plain loop?", _cases)
