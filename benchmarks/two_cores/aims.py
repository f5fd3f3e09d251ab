"""Compare the results with the aims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from benchmarks.two_cores.stashing import StashMemory
from benchmarks.two_cores.table import DDP, ONE_PROCESS, Sample, Spread, ratios

SHARED_NOTHING, ASYNCHRONOUS, UNSTASHED = (
    "two processes that share nothing",
    "ours 1f1b",
    "ours 1f1b, weights not stashed",
)
OF_TWO_CORES = {"transformer": 0.97, "vgg_like": 0.94}
OF_TORCH = {"transformer": 1.05, "vgg_like": 1.0}
OF_DDP = 4.3  # vgg_like over 1 Gbit/s
STASHING_TIME, STASHING_MEMORY = 0.05, 0.05
Row = tuple[str, str, str, str]


def aims_markdown(samples: Sequence[Sample], memory: Sequence[StashMemory]) -> str:
    """Return a table of all aims that `samples` and `memory` have results for."""
    rows: list[Row] = []
    for model, network in dict.fromkeys((sample.model, sample.network) for sample in samples):
        here = [sample for sample in samples if (sample.model, sample.network) == (model, network)]
        rows += _of_network(model, network, here)
    rows += [_of_memory(each) for each in memory]
    headers = ("aim", "where", "result", "")
    return "### Aims\n\n" + tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _of_network(model: str, network: str, samples: Sequence[Sample]) -> Iterator[Row]:
    where, of_cores = f"{model}, {network}", OF_TWO_CORES[model]
    if found := ratios(samples, ASYNCHRONOUS, ONE_PROCESS):
        half = Spread.of([ratio / 2 for ratio in found])
        aim = f"1f1b at least {of_cores:.0%} of twice one process"
        yield aim, where, half.text(".1%"), _said(half.median >= of_cores)
    if found := ratios(samples, ASYNCHRONOUS, SHARED_NOTHING):
        yield (
            "1f1b beside two processes that share nothing (no aim)",
            where,
            Spread.of(found).text(".1%"),
            "",
        )
    if (model, network) == ("vgg_like", "1gbit") and (found := ratios(samples, ASYNCHRONOUS, DDP)):
        times = Spread.of(found)
        yield (
            f"1f1b at least {OF_DDP} times DDP",
            where,
            times.text(".2f"),
            _said(times.median >= OF_DDP),
        )
    for name in dict.fromkeys(sample.contender for sample in samples):
        flush, _, count = name.partition(", ")
        if flush == "ours 1f1b-flush":
            yield from _of_microbatches(model, where, count, samples)
    # In the first stage's processor time; samples/s hide it where another stage is slower.
    if found := ratios(samples, ASYNCHRONOUS, UNSTASHED, lambda sample: sample.first_stage_s):
        overhead = Spread.of([ratio - 1 for ratio in found])
        aim = f"weight stashing at most {STASHING_TIME:.0%} of the first stage's step"
        yield aim, where, overhead.text("+.1%"), _said(overhead.median <= STASHING_TIME)


def _of_microbatches(
    model: str, where: str, count: str, samples: Sequence[Sample]
) -> Iterator[Row]:
    flush, least = f"ours 1f1b-flush, {count}", OF_TORCH[model]
    if found := ratios(samples, flush, f"torch 1F1B, {count}"):
        times = Spread.of(found)
        yield (
            f"1f1b-flush at least {least} times torch's, {count}",
            where,
            times.text(".2f"),
            _said(times.median >= least),
        )
    if found := ratios(samples, f"ours zb-h1, {count}", flush):
        times = Spread.of(found)
        yield (
            f"zb-h1 ahead of 1f1b-flush, {count}",
            where,
            times.text(".2f"),
            _said(times.median > 1),
        )


def _of_memory(memory: StashMemory) -> Row:
    error = memory.measured_bytes / memory.formula_bytes - 1
    result = (
        f"{memory.measured_bytes / 1e6:.1f} MB, by the formula "
        f"{memory.formula_bytes / 1e6:.1f} ({error:+.1%})"
    )
    aim = f"memory of {memory.versions} versions within {STASHING_MEMORY:.0%} of (d - 1) W"
    return (
        aim,
        f"{memory.model}, W = {memory.weight_bytes / 1e6:.1f} MB",
        result,
        _said(abs(error) <= STASHING_MEMORY),
    )


def _said(reached: bool) -> str:
    return "reached" if reached else "missed"
