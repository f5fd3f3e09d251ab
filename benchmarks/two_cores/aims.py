"""Compare the results with the aims."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from benchmarks.two_cores.stashing import StashMemory
from benchmarks.two_cores.table import DDP, ONE_PROCESS, Sample

SHARED_NOTHING, ASYNCHRONOUS, UNSTASHED = (
    "two processes that share nothing",
    "ours 1f1b",
    "ours 1f1b, weights not stashed",
)
OF_TWO_CORES = {"transformer": 0.97, "vgg_like": 0.94}
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
    rates = _medians(samples)
    where = f"{model}, {network}"
    if ASYNCHRONOUS in rates:
        rate, of_cores = rates[ASYNCHRONOUS], OF_TWO_CORES[model]
        if ONE_PROCESS in rates:
            ratio = rate / (2 * rates[ONE_PROCESS])
            yield f"1f1b at least {of_cores:.0%} of twice one process", where, f"{ratio:.1%}", _said(ratio >= of_cores)
        if SHARED_NOTHING in rates:
            ratio = rate / rates[SHARED_NOTHING]
            yield "1f1b beside two processes that share nothing (no aim)", where, f"{ratio:.1%}", ""
        if DDP in rates and (model, network) == ("vgg_like", "1gbit"):
            ratio = rate / rates[DDP]
            yield f"1f1b at least {OF_DDP} times DDP", where, f"{ratio:.2f} times", _said(ratio >= OF_DDP)
    yield from _of_microbatches(where, rates)
    yield from _of_stashing(where, samples)


def _of_microbatches(where: str, rates: dict[str, float]) -> Iterator[Row]:
    for name in list(rates):
        flush, _, count = name.partition(", ")
        if flush != "ours 1f1b-flush":
            continue
        if (torchs := rates.get(f"torch 1F1B, {count}")) is not None:
            ratio = rates[name] / torchs
            yield f"1f1b-flush no slower than torch's 1F1B, {count}", where, f"{ratio:.2f} times", _said(ratio >= 1)
        if (zero_bubble := rates.get(f"ours zb-h1, {count}")) is not None:
            ratio = zero_bubble / rates[name]
            yield f"zb-h1 ahead of 1f1b-flush, {count}", where, f"{ratio:.2f} times", _said(ratio > 1)


def _of_stashing(where: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """Return the cost of stashing in the first stage's computing time; samples/s hide it if another stage is slower."""
    seconds = {
        name: statistics.median(s.first_stage_s for s in samples if s.contender == name and s.first_stage_s is not None)
        for name in (ASYNCHRONOUS, UNSTASHED)
        if any(s.contender == name for s in samples)
    }
    if len(seconds) == 2:
        overhead = seconds[ASYNCHRONOUS] / seconds[UNSTASHED] - 1
        aim = f"weight stashing at most {STASHING_TIME:.0%} of the first stage's step"
        yield aim, where, f"{overhead:+.1%}", _said(overhead <= STASHING_TIME)


def _of_memory(memory: StashMemory) -> Row:
    error = memory.measured_bytes / memory.formula_bytes - 1
    result = f"{memory.measured_bytes / 1e6:.1f} MB, by the formula {memory.formula_bytes / 1e6:.1f} ({error:+.1%})"
    aim = f"memory of {memory.versions} versions within {STASHING_MEMORY:.0%} of (d - 1) W"
    return aim, f"{memory.model}, W = {memory.weight_bytes / 1e6:.1f} MB", result, _said(abs(error) <= STASHING_MEMORY)


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    rates: dict[str, list[float]] = {}
    for sample in samples:
        rates.setdefault(sample.contender, []).append(sample.samples_per_s)
    return {name: statistics.median(values) for name, values in rates.items()}


def _said(reached: bool) -> str:
    return "reached" if reached else "missed"
