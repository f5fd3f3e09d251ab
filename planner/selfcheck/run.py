"""Run the checks one after the other, and report a row per case."""

import math
import os
import socket
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import cast, get_args

import torch.distributed as dist

from planner.errors import InputError, PlannerError, reason_of
from planner.formats.files import Record
from planner.formats.held_folder import held_folder
from planner.formats.names import Backend
from planner.formats.shown import Shown
from planner.options.option import keywords_of
from planner.options.verbs import SelftestOptions
from planner.profiler.links.measure_cluster import measure_host
from planner.profiler.this_machine import (
    check_positive,
    describe_gpu,
    describe_processor,
    describe_software,
    gpus_of_kinds,
    parse_device,
)
from planner.reporting.tables.table import Table
from planner.runtime import kinds_here, runtime_of
from planner.selfcheck import cuts, listening, training
from planner.selfcheck.lab import Case, Lab, Outcome, Result
from planner.units import format_bandwidth, format_seconds
from planner.version import __version__
from planner.workers.launch import environment
from planner.workers.meeting import worker_variables
from planner.workers.place import check_backend, kind_here

# A GPU would multiply in TF32 in some kernels, which hides differences. The libraries read this
# when they are loaded.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}


class Row(Record):
    """What one case of a check found."""

    check: str
    name: str
    result: Result
    found: str  # what was measured; why the case was skipped, or how it failed
    value: float | None = None  # the number that was judged
    limit: float | None = None  # the most that it may be
    seconds: float


class SelftestReport(Shown, Record):
    """The rows of a self-test on one machine."""

    version: str  # of planner
    date: str
    device: str
    workers: int
    rows: tuple[Row, ...]
    seconds: float

    def __str__(self) -> str:
        """Return a table of the rows, and a line with their counts and the machine."""
        rows = [
            [row.check, row.name, row.result, textwrap.fill(row.found, 96), f"{row.seconds:.1f}"]
            for row in self.rows
        ]
        table = Table(["check", "case", "result", "found", "seconds"], rows, "llllr").text()
        results = [row.result for row in self.rows]
        counts = ", ".join(f"{results.count(result)} {result}" for result in get_args(Result))
        where = f"planner {self.version} on {self.device} with {self.workers} workers, {self.date}"
        return f"{table}\n\n{counts} in {self.seconds:.0f} s: {where}"

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return all(row.result != "failed" for row in self.rows)


def environment_cases(lab: Lab) -> Iterator[Case]:
    """Yield what this machine is; a case fails where that cannot be found out."""
    yield "software", partial(_told, describe_software)
    yield "machine", partial(_told, _machine)
    yield "network", partial(_told, _network)
    for index, gpu in enumerate(gpus_of_kinds(kinds_here())):
        yield f"gpu {index}", partial(_told, partial(describe_gpu, gpu))


def _told(describe: Callable[[], str]) -> Outcome:
    return Outcome("passed", describe())


def _machine() -> str:
    return f"{describe_processor()}, load {os.getloadavg()[0]:.1f}"


def _network() -> str:
    interfaces = [name for _, name in socket.if_nameindex()]
    names = sorted(name for name in os.environ if name.startswith(("GLOO_", "NCCL_")))
    return ", ".join([*interfaces, *(f"{name}={os.environ[name]}" for name in names)])


def link_cases(lab: Lab) -> Iterator[Case]:
    """Yield the speed between two workers, over gloo and over the device's own backend."""
    yield "gloo", partial(_link, lab, "gloo")
    own = runtime_of(lab.device).backend
    yield "nccl", partial(_link, lab, "nccl" if own == "gloo" else cast("Backend", own))


def _link(lab: Lab, backend: Backend) -> Outcome:
    enough_gpus = lab.backend == backend or runtime_of(lab.device).count() > 1
    there = lab.on_gpu and dist.is_backend_available(backend) and enough_gpus
    if lab.workers < 2 or (backend != "gloo" and not there):
        why = "two workers have a link; NCCL needs two GPUs, and a PyTorch that has it"
        return Outcome("skipped", why)

    (level,) = measure_host(2, lab.device.type, backend).levels
    each_way = format_bandwidth(level.bandwidth_bytes_per_s)
    latency = format_seconds(level.latency_s)
    sums = format_bandwidth(level.all_reduce_bandwidth_bytes_per_s or 0.0)
    found = f"{each_way} each way at once, {latency} of latency, {sums} in all-reduces"
    return Outcome("passed", found)


CHECKS: Mapping[str, Callable[[Lab], Iterator[Case]]] = {
    "environment": environment_cases,
    "links": link_cases,
    "listening": listening.cases,
    "cuts": cuts.cases,
    "training": training.training_cases,
    "memory": training.memory_cases,
    "failures": training.failure_cases,
}


@keywords_of(SelftestOptions)
def selftest(options: SelftestOptions) -> SelftestReport:
    """Check on this host that planning and training work; all files are temporary, and no process
    is left.
    """
    _refuse_unknown("only", options.only)
    _refuse_unknown("skip", options.skip)
    if int({**os.environ, **worker_variables(os.environ)}.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "the self-test is for one host and starts its own workers, and this is one of several "
            "processes",
            hint="run it once on each host, without torchrun",
        )

    check_positive("workers", options.workers)
    kind = options.device or kind_here()
    check_backend(kind, options.backend)
    device = parse_device(kind)

    started = time.monotonic()
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    rows = []
    with held_folder("selftest") as folder, environment(EXACT):
        lab = Lab(device, options.workers, folder, tuple(options.model), options.backend)
        for check in _chosen(options):
            for case in CHECKS[check](lab):
                row = run_case(check, case)
                rows.append(row)
                if options.on_row is not None:
                    options.on_row(row)

    return SelftestReport(
        version=__version__,
        date=date,
        device=kind,
        workers=options.workers,
        rows=tuple(rows),
        seconds=time.monotonic() - started,
    )


def _refuse_unknown(argument: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in CHECKS:
            hint = f"the checks are {', '.join(CHECKS)}"
            raise InputError(f"`{argument}={name}` is no check", hint=hint)


def _chosen(options: SelftestOptions) -> list[str]:
    return [
        check for check in CHECKS if check in (options.only or CHECKS) and check not in options.skip
    ]


def run_case(check: str, case: Case) -> Row:
    """Run one case; whatever it raises is how it failed."""
    name, find = case
    started = time.monotonic()
    try:
        outcome = find()
    except PlannerError as error:
        outcome = Outcome("failed", error.message)
    except Exception as error:
        outcome = Outcome("failed", reason_of(error))

    finite = outcome.value is not None and math.isfinite(outcome.value)
    return Row(
        check=check,
        name=name,
        result=outcome.result,
        found=outcome.found,
        value=outcome.value if finite else None,  # JSON has no NaN
        limit=outcome.limit,
        seconds=time.monotonic() - started,
    )
