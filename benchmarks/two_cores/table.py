"""Turn samples into tables: medians over the rounds with their range, and ratios to the plain loop and to DDP."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

ONE_PROCESS = "one process"
DDP = "DDP"
HEADERS = ("contender", "samples/s", "min to max", "predicted", "of one process", "of DDP")


@dataclass(frozen=True)
class Sample:
    """One measured window."""

    model: str
    network: str
    contender: str
    round: int
    samples_per_s: float
    predicted_samples_per_s: float | None = None
    first_stage_s: float | None = None  # computing time of the first stage per minibatch


def markdown(samples: Sequence[Sample]) -> str:
    """Return a Markdown table for each model and network, in the order of measurement."""
    groups = dict.fromkeys((sample.model, sample.network) for sample in samples)
    return "\n\n".join(
        f"### {model}, {network}\n\n"
        + _table([sample for sample in samples if (sample.model, sample.network) == (model, network)])
        for model, network in groups
    )


def _table(samples: Sequence[Sample]) -> str:
    rates: dict[str, list[float]] = {}
    predicted: dict[str, float | None] = {}
    for sample in samples:
        rates.setdefault(sample.contender, []).append(sample.samples_per_s)
        predicted[sample.contender] = sample.predicted_samples_per_s
    medians = {name: statistics.median(values) for name, values in rates.items()}
    # The first round starts with the first contender, so this is the order of their definition.
    rows = [
        (
            name,
            f"{medians[name]:.1f}",
            f"{min(values):.1f} to {max(values):.1f}",
            "" if predicted[name] is None else f"{predicted[name]:.1f}",
            _ratio(medians[name], medians.get(ONE_PROCESS)),
            _ratio(medians[name], medians.get(DDP)),
        )
        for name, values in rates.items()
    ]
    columns = ("left", *("right",) * (len(HEADERS) - 1))
    return tabulate(rows, HEADERS, tablefmt="github", colalign=columns, disable_numparse=True)


def _ratio(value: float, base: float | None) -> str:
    return "" if base is None else f"{value / base:.2f}"
