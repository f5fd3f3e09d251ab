"""Records of what is predicted and measured for the paper's rows, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from benchmarks.kept import Results, number, share
from benchmarks.published.configs.rows import ROWS, Row
from benchmarks.published.emulated_rows import Ran

PARTS = ("solved", "nominal", "implied", "straight", "gpipe")
# Narayanan et al., SOSP 2019: how much lower GPipe's throughput is than PipeDream's, at PipeDream's
# depth (NOAM).
SLOWER = {"gnmt16, 4x4 (A)": 0.55, "gnmt16, 8x2 (B)": 0.71}


@dataclass(frozen=True)
class Solved:
    """The planner's answer to a row; speed-ups are over data parallelism.

    Attributes:
        config: of our plan.
        over_data_parallel: predicted, of our plan.
        communication_cut: share of data parallelism's bytes that our plan does not send.
        theirs_over_data_parallel: predicted, of the published configuration with the best cuts.
        data_parallel_over_one: predicted speed-up of data parallelism over one device.
        implied_bytes_per_s: the largest bandwidth at which the published speed-up is about met;
            None where there is none among those tried.
    """

    config: str
    over_data_parallel: float
    communication_cut: float | None
    theirs_over_data_parallel: float | None
    data_parallel_over_one: float
    implied_bytes_per_s: float | None


@dataclass(frozen=True)
class Scheduled:
    """GNMT-16 in 16 stages under one schedule: seconds per 16 microbatches, simulated and
    measured.
    """

    simulated_s: float
    measured_s: float


def rows_of(part: str) -> list[Row]:
    """Return the published rows of a part."""
    sosp = [row for row in ROWS if row.table == "SOSP"]
    match part:
        case "solved":
            return sosp
        case "straight":
            return [row for row in ROWS if row.table == "arXiv" and row.config == "straight"]
        case "gpipe":
            return [row for row in sosp if row.name in SLOWER]
        case _:
            return [row for row in sosp if len(row.replicas) > 1]


def tables(results: Results) -> str:
    """Return all saved results in Markdown."""
    parts: list[str] = []
    if solved := results.records("solved", Solved):
        parts.append(
            f"Solved at the nominal bandwidth "
            f"({results.about('solved')}):\n\n{solved_table(solved)}"
        )
    for part, rate in (
        ("nominal", "the nominal bandwidth"),
        ("implied", "the bandwidth that theirs over DP implies"),
    ):
        if ran := results.records(part, Ran):
            about = f"Run at {rate}; emulated devices, {results.about(part)}"
            parts.append(f"{about}:\n\n{run_table(rows_of(part), ran)}")
    if straight := results.records("straight", Ran):
        about = f"Straight pipelines; emulated devices, {results.about('straight')}"
        parts.append(f"{about}:\n\n{straight_table(straight)}")
    if scheduled := results.records("gpipe", Scheduled):
        about = f"Schedules of GNMT-16 in 16 stages; emulated devices, {results.about('gpipe')}"
        parts.append(f"{about}:\n\n{schedule_table(scheduled)}")
    return "\n\n".join(parts)


def solved_table(solved: Mapping[str, Solved]) -> str:
    """Return the table of published and predicted values."""
    headers = (
        "row",
        "published",
        "over DP",
        "ours",
        "over DP",
        "less sent",
        "published config: over DP",
        "DP over 1",
    )
    rows = [
        [
            row.name,
            row.config,
            number(row.over_data_parallel),
            ours.config,
            number(ours.over_data_parallel),
            share(ours.communication_cut),
            number(ours.theirs_over_data_parallel),
            number(ours.data_parallel_over_one),
        ]
        for row in rows_of("solved")
        if (ours := solved.get(row.name)) is not None
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def run_table(published: Sequence[Row], ran: Mapping[str, Ran]) -> str:
    """Return the table of published and measured values."""
    headers = [
        "row",
        "link, Gbps",
        "published",
        "over DP",
        "ours",
        "over DP",
        "published config: over DP",
    ]
    headers += ["DP over 1", "predicted / measured"]
    rows = []
    for row in published:
        if (ours := ran.get(row.name)) is not None:
            same = ours.config == "-".join(map(str, row.replicas))
            theirs = "as ours" if same else number(ours.theirs_over_data_parallel)
            rows.append(
                [
                    row.name,
                    f"{8e-9 * ours.bandwidth_bytes_per_s:.2f}",
                    row.config,
                    number(row.over_data_parallel),
                    ours.config,
                    number(ours.over_data_parallel),
                    theirs,
                    number(ours.data_parallel_over_one),
                    number(ours.predicted_over_measured),
                ]
            )
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def straight_table(ran: Mapping[str, Ran]) -> str:
    """Return the speed-ups over one machine of the straight pipeline, the best plan and data
    parallelism.
    """
    replicated = {
        row.name: row for row in ROWS if row.table == "arXiv" and row.config != "straight"
    }
    headers = (
        "row",
        "link, Gbps",
        "straight, published",
        "straight",
        "replicated, published",
        "replicated",
        "BSP",
    )
    rows = [
        [
            row.name,
            f"{8e-9 * ours.bandwidth_bytes_per_s:.2f}",
            number(row.over_one),
            number(ours.theirs_over_one),
            f"{replicated[row.name].config}: {number(replicated[row.name].over_one)}",
            f"{ours.config}: {number(ours.over_one)}",
            number(ours.data_parallel_over_one),
        ]
        for row in rows_of("straight")
        if (ours := ran.get(row.name)) is not None
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def schedule_table(scheduled: Mapping[str, Scheduled]) -> str:
    """Return the seconds under each schedule, and how much lower than 1F1B's its throughput is."""
    headers = (
        "row",
        "schedule",
        "simulated, s",
        "measured, s",
        "slower, simulated",
        "slower",
        "slower, published",
    )
    rows = []
    for key, one in scheduled.items():
        row, _, schedule = key.partition(": ")
        if (base := scheduled.get(f"{row}: 1f1b")) is not None:
            slower = (1 - base.simulated_s / one.simulated_s, 1 - base.measured_s / one.measured_s)
            published = SLOWER.get(row) if schedule == "gpipe, recomputing" else None
            times = (f"{one.simulated_s:.2f}", f"{one.measured_s:.2f}")
            rows.append([row, schedule, *times, *map(share, slower), share(published)])
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
