"""Turn samples into tables: medians over the cycles with their quartiles, and ratios of those who
took turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

ONE_PROCESS = "one process"
DDP = "DDP"
ASYNCHRONOUS = "ours 1f1b"
HEADERS = ("contender", "samples/s", "quartiles", "predicted", "of one process", "of DDP")


@dataclass(frozen=True)
class Sample:
    """One cycle of a contender: the mean of its windows in it."""

    model: str
    network: str
    group: str  # contenders of a group have taken turns
    contender: str
    cycle: int
    samples_per_s: float
    predicted_samples_per_s: float | None = None


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of `values`, of which there is at least one."""
        quartiles = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else [*values] * 3
        )
        return cls(*quartiles)

    def text(self, form: str) -> str:
        """Return it as "1.05 (1.04 to 1.06)", each number in this format."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def ratios(samples: Sequence[Sample], of: str, to: str) -> list[float]:
    """Return, for each cycle in which both took turns, the rate of contender `of` as a multiple of
    that of `to`.
    """
    found: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for sample in samples:
        key = (sample.model, sample.network, sample.group, sample.cycle)
        found.setdefault(key, {})[sample.contender] = sample.samples_per_s
    return [values[of] / values[to] for values in found.values() if of in values and to in values]


def markdown(samples: Sequence[Sample]) -> str:
    """Return a Markdown table for each model and network, in the order of measurement."""
    groups = dict.fromkeys((sample.model, sample.network) for sample in samples)
    return "\n\n".join(
        f"### {model}, {network}\n\n"
        + _table(
            [sample for sample in samples if (sample.model, sample.network) == (model, network)]
        )
        for model, network in groups
    )


def _table(samples: Sequence[Sample]) -> str:
    rates: dict[str, list[float]] = {}
    predicted: dict[str, float | None] = {}
    for sample in samples:
        rates.setdefault(sample.contender, []).append(sample.samples_per_s)
        predicted[sample.contender] = sample.predicted_samples_per_s
    rows = []
    for name, values in rates.items():
        spread = Spread.of(values)
        rows.append(
            (
                name,
                f"{spread.median:.1f}",
                f"{spread.low:.1f} to {spread.high:.1f}",
                "" if predicted[name] is None else f"{predicted[name]:.1f}",
                _ratio(samples, name, ONE_PROCESS),
                _ratio(samples, name, DDP),
            )
        )
    columns = ("left", *("right",) * (len(HEADERS) - 1))
    return tabulate(rows, HEADERS, tablefmt="github", colalign=columns, disable_numparse=True)


def _ratio(samples: Sequence[Sample], of: str, to: str) -> str:
    """Return the median ratio over the cycles, or of the medians where the two have not taken
    turns.
    """
    found = ratios(samples, of, to)
    if found:
        return f"{Spread.of(found).median:.2f}"
    rates = {
        name: [sample.samples_per_s for sample in samples if sample.contender == name]
        for name in (of, to)
    }
    return (
        f"{statistics.median(rates[of]) / statistics.median(rates[to]):.2f}"
        if all(rates.values())
        else ""
    )
