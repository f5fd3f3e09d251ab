"""Compare estimates and prices with published runs on real GPUs. See README.md in this folder.

python -m benchmarks.gpu_truth
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.gpu_truth import (
    aceso,
    amp,
    amp_layer_times,
    bigscience,
    calculon,
    dgxc,
    galvatron,
    mist,
    primus,
    recipes,
    sailor,
    vocab_parallel,
    vtrain,
)
from benchmarks.gpu_truth.calibrated import calibrated, factors
from benchmarks.gpu_truth.rows import ANCHORS, Row
from benchmarks.gpu_truth.summary import error_of, scatter_svg, summary

SOURCES: Mapping[str, Callable[[], Iterator[Row]]] = {
    "vtrain": vtrain.rows,
    "mist": mist.rows,
    "aceso": aceso.rows,
    "calculon": calculon.rows,
    "galvatron": galvatron.rows,
    "sailor": sailor.rows,
    "dgxc": dgxc.rows,
}

# Sets that the means over all sources leave out: clusters whose links are not what their data sheet
# says, and schedules by measured stage times.
APART: Mapping[str, Callable[[], Iterator[Row]]] = {
    "amp": amp.rows,
    "amp v100": amp_layer_times.rows,
    "amp mixed": amp.mixed_rows,
    "bigscience": bigscience.rows,
    "bigscience by data sheet": bigscience.rows_by_data_sheet,
    "recipes": recipes.rows,
    "vocab-parallel": vocab_parallel.rows,
    "vocab-parallel by estimate": vocab_parallel.rows_by_estimate,
    "primus": primus.rows,
}

_CALIBRATED = ("calibrated on other rows", "on other jobs")


def rows_table(rows: Sequence[Row]) -> str:
    """Return the predicted rows."""
    cells = []
    for row in rows:
        if row.predicted is not None:
            times = [f"{seconds:.4g}" for seconds in (row.measured_s, row.predicted.seconds)]
            errors = [
                _share(error_of(row, seconds)) for seconds in (row.calibrated_s, row.by_job_s)
            ]
            cells.append(
                [row.source, row.job, row.plan, *times, _share(row.error), *errors, _peaks(row)]
            )
    headers = [
        "source",
        "job",
        "plan",
        "measured s",
        "predicted s",
        "error",
        *_CALIBRATED,
        "memory, by stage",
    ]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def _peaks(row: Row) -> str:
    errors = [predicted / measured - 1 for predicted, measured in row.memory]
    return f"{min(errors):+.0%} to {max(errors):+.0%}" if errors else ""


def summary_table(rows: Sequence[Row]) -> str:
    """Return a line per source."""
    cells = []
    for source in dict.fromkeys(row.source for row in rows):
        found = summary([row for row in rows if row.source == source])
        counts = [len(found.rows), sum(row.predicted is not None for row in found.rows)]
        errors = [
            "" if error is None else f"{error:.1%}"
            for error in (found.mean_error, found.median_error, found.calibrated, found.by_job)
        ]
        tau = "" if found.tau is None else f"{found.tau:.2f}"
        memory = (
            ""
            if found.memory_error is None
            else f"{found.memory_error:.1%}, worst {found.worst_memory:.1%}"
        )
        shares = [*errors, _share(found.bias), tau, _share(found.regret), memory]
        cells.append([source, *counts, *shares, _lacking(found.rows)])
    headers = [
        "source",
        "rows",
        "predicted",
        "mean absolute error",
        "median",
        *_CALIBRATED,
        "bias",
        "tau",
        "regret",
    ]
    headers += ["memory of stages", "the others need"]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def factors_table(rows: Sequence[Row]) -> str:
    """Return what all rows of a source say of its device."""
    cells = []
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source and row.predict is not None]
        if own and own[0].spec is not None:
            shares = (
                own[0].spec.achieved_arithmetic["gemm"],
                own[0].spec.achieved_bandwidth["pointwise"],
            )
            fitted = [
                f"{share:.2f} x {factor:.2f}"
                for share, factor in zip(shares, factors(own), strict=True)
            ]
            cells.append([source, own[0].spec.name, len(own), *fitted])
    headers = [
        "source",
        "device",
        "rows",
        "share of the peak, products",
        "share of the bandwidth, pointwise",
    ]
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True)


def _lacking(rows: Sequence[Row]) -> str:
    counts = Counter(need for row in rows for need in row.needs)
    return ", ".join(f"{need} ({count})" for need, count in counts.items())


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def main() -> None:
    """Print the tables as Markdown, and draw the scatter plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        choices=[*SOURCES, *APART],
        action="append",
        help="only these; may be repeated",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw predicted against measured times here"
    )
    arguments = parser.parse_args()
    if not ANCHORS.is_dir():
        raise SystemExit(f"there are no measurements: '{ANCHORS}' is no folder")
    rows = calibrated(
        [
            row.now()
            for source in arguments.source or SOURCES
            for row in {**SOURCES, **APART}[source]()
        ]
    )
    print(f"{rows_table(rows)}\n\n{summary_table(rows)}\n\n{factors_table(rows)}")
    if arguments.svg is not None:
        arguments.svg.write_text(scatter_svg(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
