"""Does a choice by the links of a data sheet hold, or is it said that it may not?

    python -m benchmarks.gpu_truth.slow_links

`plan fit` prices an answer that rests on a data sheet's rate again at a fifth of it, and names the
plan that is faster there (`planner.analysis.slow_links`). Here the runs of a job are the plans: the
one that is fastest by the data sheet is chosen, and all are priced at the lower rates. A choice is
right where it was measured within the noise of the fastest run, and warned of where another run is
faster on the slow links.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tabulate import tabulate

from benchmarks.gpu_truth import amp, bigscience
from planner.solver.tuning.record import STANDARD

NOISE = 0.03  # runs of one configuration differ by so much (README of the anchors)


@dataclass(frozen=True)
class Way:
    """A run of a job.

    Attributes:
        job: what was to be done, on which GPUs.
        plan: how.
        measured_s: seconds of an iteration.
        seconds: predicted, where links reach a share of their data sheet.
    """

    job: str
    plan: str
    measured_s: float
    seconds: Callable[[float], float]


@dataclass(frozen=True)
class Choice:
    """What is chosen for a job by the data sheet, and what is said of it.

    Attributes:
        chosen: the fastest run by the data sheet.
        slow: the fastest run on the slowest links.
        speedup: of `slow` over `chosen` there.
        regret: how much slower `chosen` was measured than the fastest run.
        slow_regret: the same of `slow`.
    """

    chosen: Way
    slow: Way
    speedup: float
    regret: float
    slow_regret: float

    @property
    def is_right(self) -> bool:
        """Whether no run is faster beyond noise."""
        return self.regret <= NOISE

    @property
    def is_warned(self) -> bool:
        """Whether the answer says that it flips."""
        return self.speedup >= STANDARD.links.min_speedup


def ways() -> Iterator[Way]:
    """Yield the runs on links of a data sheet."""
    for record in bigscience.records():
        row = bigscience.row_of(record, measured_links=False)
        yield Way(row.job, row.plan, row.measured_s, partial(_on_a100, record))
    for record, row in amp.recorded_rows():
        yield Way(row.job, row.plan, row.measured_s, partial(_on_t4, record))


def _on_a100(record: bigscience.Record, share: float) -> float:
    cluster = bigscience.cluster_by_data_sheet(int(record["gpus"]), share)
    return bigscience.seconds_on(record, cluster, bigscience.SPEC)


def _on_t4(record: amp.Record, share: float) -> float:
    return amp.predicted(record, amp.hosted("t4"), share).seconds


def choice(job: Sequence[Way]) -> Choice:
    """Choose between the runs of a job."""
    share = min(STANDARD.links.shares)
    chosen = min(job, key=lambda way: way.seconds(1.0))
    slow_s = {way: way.seconds(share) for way in job}
    slow = min(job, key=slow_s.__getitem__)
    least_s = min(way.measured_s for way in job)
    return Choice(
        chosen,
        slow,
        speedup=slow_s[chosen] / slow_s[slow],
        regret=chosen.measured_s / least_s - 1,
        slow_regret=slow.measured_s / least_s - 1,
    )


def choices() -> list[Choice]:
    """Return the choices of all jobs with several plans."""
    jobs = defaultdict[str, list[Way]](list)
    for way in ways():
        jobs[way.job].append(way)
    return [choice(job) for job in jobs.values() if len({way.plan for way in job}) > 1]


def share_right_or_warned(found: Sequence[Choice]) -> float:
    """Return the share of jobs with the right choice, or a sentence that it flips."""
    return sum(each.is_right or each.is_warned for each in found) / len(found)


def table(found: Sequence[Choice]) -> str:
    """Return a line per job."""
    cells = [
        [
            each.chosen.job,
            each.chosen.plan,
            f"{each.regret:+.1%}",
            each.slow.plan if each.is_warned else "",
            f"{each.speedup:.2f}x" if each.is_warned else "",
            f"{each.slow_regret:+.1%}" if each.is_warned else "",
            _verdict(each),
        ]
        for each in found
    ]
    headers = [
        "job",
        "chosen by the data sheet",
        "slower than the fastest run",
        "named for a fifth of the rate",
        "there",
        "slower than the fastest run, measured",
        "verdict",
    ]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def _verdict(found: Choice) -> str:
    if found.is_right:
        return "right"
    return "said that it flips" if found.is_warned else "wrong"


def main() -> None:
    """Print the table as Markdown."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    found = choices()
    print(f"{table(found)}\n\nright, or said that it flips: {share_right_or_warned(found):.0%}")


if __name__ == "__main__":
    main()
