"""The tables of the README and of the page about GPUs, from what was kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import ROOT, Results, between_marks
from benchmarks.on_gpu import context, host, kernels, models
from planner.formats.files import write_text
from planner.profiler.estimated.devices import DEVICES

FOLDER = Path(__file__).parent
README, PAGE = FOLDER / "README.md", ROOT / "docs" / "gpu-truth.md"
SHEET = DEVICES["h200"]
MIB = 2**20


def marks(part: str) -> tuple[str, str]:
    """Return the comments in a page between which the table of a part stands."""
    return f"<!-- on_gpu_{part}: written by benchmarks.on_gpu -->", f"<!-- end of on_gpu_{part} -->"


def filled(page: str, folder: Path = FOLDER) -> str:
    """Return a page with each table that it has a place for."""
    for part, text in all_tables(folder).items():
        if marks(part)[0] in page:
            page = between_marks(page, marks(part), text)
    return page


def write_pages() -> None:
    """Write the tables into README and page."""
    for page in (README, PAGE):
        write_text(page, filled(page.read_text(encoding="utf-8")))


def all_tables(folder: Path) -> dict[str, str]:
    """Return each part as Markdown: what was measured, when and on what."""
    results = Results(folder, save=False)
    rows = results.records("models", models.Row)
    contexts = _contexts(results.records("context", context.Row))
    communicators = _communicators(results.records("communicators", context.Communicators))
    measured = kernels.read(folder / kernels.FILE) if (folder / kernels.FILE).exists() else []
    found = {
        "models": f"{_speed(rows)}\n\n{_memory(rows)}",
        "host": _host(results.records("host", host.Row)),
        "context": f"{contexts}\n\n{communicators}",
        "kernels": _kernels(measured),
    }
    return {part: f"Measured, {results.about(part)}.\n\n{text}" for part, text in found.items()}


def _table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _speed(rows: dict[str, models.Row]) -> str:
    headers = [
        "model",
        "predicted, samples/s",
        "measured",
        "error",
        "plain PyTorch step",
        "measured beside it",
    ]
    lines = [
        [
            name,
            f"{row.predicted_per_s:,.0f}",
            f"{row.measured_per_s:,.0f}",
            f"{row.predicted_per_s / row.measured_per_s - 1:+.1%}",
            f"{row.batch / row.plain_s:,.0f}",
            f"{row.measured_per_s * row.plain_s / row.batch - 1:+.1%}",
        ]
        for name, row in rows.items()
    ]
    return _table(lines, headers)


def _memory(rows: dict[str, models.Row]) -> str:
    headers = [
        "model",
        "predicted, MB",
        "measured",
        "error",
        "plain PyTorch step",
        "reserved",
        "over measured",
    ]
    lines = [
        [
            name,
            f"{row.predicted_bytes / 1e6:,.0f}",
            f"{row.peak_bytes / 1e6:,.0f}",
            f"{row.predicted_bytes / row.peak_bytes - 1:+.1%}",
            f"{row.plain_peak_bytes / 1e6:,.0f}",
            f"{(row.reserved_bytes or 0) / 1e6:,.0f}",
            f"{(row.reserved_bytes or 0) / row.peak_bytes:.2f}",
        ]
        for name, row in rows.items()
    ]
    return _table(lines, headers)


def _host(rows: dict[str, host.Row]) -> str:
    lines = [
        [
            name,
            f"{row.host_s * 1e6:,.0f}",
            "" if row.wall_s is None else f"{row.wall_s * 1e6:,.0f}",
            "" if row.kernels_s is None else f"{row.kernels_s * 1e6:,.0f}",
            row.launches,
            f"{row.host_s / row.launches * 1e6:.1f}",
        ]
        for name, row in rows.items()
    ]
    return _table(
        lines,
        ["what", "host, µs", "until the GPU is done", "its kernels", "launches", "host per launch"],
    )


def _contexts(rows: dict[str, context.Row]) -> str:
    uses = dict.fromkeys(what for row in rows.values() for what in row.after_bytes)
    lines = [
        ["at the start", *(f"{row.start_bytes / MIB:.0f}" for row in rows.values())],
        *(
            [f"after {what}", *(f"{row.after_bytes[what] / MIB:.0f}" for row in rows.values())]
            for what in uses
        ),
        ["seconds of the start", *(f"{row.start_s:.1f}" for row in rows.values())],
    ]
    return _table(lines, ["MiB beside tensors", *rows])


def _communicators(rows: dict[str, context.Communicators]) -> str:
    lines = [
        [name, ", ".join(f"{each / 1e6:.0f}" for each in row.each_bytes)]
        for name, row in rows.items()
    ]
    return _table(
        lines, ["what for", "MB of each further communicator of two ranks, in each process"]
    )


def _kernels(rows: list[kernels.Row]) -> str:
    """Return the slowest and the fastest case of each kind, beside the peak of the data sheet."""
    groups: dict[tuple[str, str, str], list[kernels.Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.dtype, row.unit), []).append(row)
    lines = []
    for (kind, dtype, unit), group in groups.items():
        there = [row.forward_rate for row in group]
        back = [row.backward_rate for row in group if row.backward_rate]
        peak = _peak(dtype, unit)
        said = f"{min(back):,.0f} to {max(back):,.0f}" if back else ""
        share = f"{max(there) / peak:.0%}"
        lines.append(
            [kind, dtype, len(group), f"{min(there):,.0f} to {max(there):,.0f}", share, said, unit]
        )
    return _table(
        lines, ["kernel", "dtype", "shapes", "forward", "best of the peak", "backward", "unit"]
    )


def _peak(dtype: str, unit: str) -> float:
    if unit == kernels.BYTES:
        return SHEET.bandwidth_bytes_per_s / 1e9
    return next(flops for name, flops in SHEET.peak_flops_per_s.items() if name == dtype) / 1e12
