"""Start the workers on this host as torchrun does, watch them, and say why one failed.

torchrun opens a store that listens on all addresses of the host. torch's store accepts a socket that is already bound:
here it listens on one address only.

The launcher reads what workers leave in the job's folder: a page of memory per worker, which says what its main thread
does, and the reasons of failures. The watch in torchrun's store (`planner.workers.watch`) needs a thread of each worker
that still runs. This one needs no help of theirs: it sees a worker that hangs with the interpreter's lock, one that is
alone in its run, one that has not started yet, and what a killed one did last.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import InputError, WorkerError
from planner.formats.files import save_record
from planner.formats.timeline import Timeline, load_timeline
from planner.workers.failures import WorkersFailedError, error_of, innermost, stage_of, worker_name
from planner.workers.hangs import HangDetector, look_at
from planner.workers.heartbeat import Beat, Heartbeat
from planner.workers.job import LAUNCHER_VARIABLE, RESULT_FILE, TIMELINE_FILE, Failure, Job, TrainResult
from planner.workers.place import CUDA_VARIABLES

LOOPBACK = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by which torch's backends choose an interface
_TIMEOUT = timedelta(minutes=5)
_LOOK_S = 0.1  # between two looks at the processes
_SHUTDOWN_S = 10.0  # from SIGTERM to SIGKILL, for the workers that are left when one has failed
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: get an interface's IPv4 address
_WATCHED_S = 0.5  # between two looks at their heartbeats
_DUMP_SIGNAL = signal.SIGUSR1  # makes a worker dump its stack
_DUMP_S = 2.0  # how long a worker has to do that
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def start_heartbeat(job: Job) -> Heartbeat:
    """Start to note what this worker does: where the launcher reads it, or else in its own memory."""
    rank = int(os.environ["RANK"])
    if job.folder is None:
        return Heartbeat()
    folder = Path(job.folder)
    # Never closed: the handler writes to it for as long as the process lives.
    faulthandler.register(_DUMP_SIGNAL, file=_dump_path(folder, rank).open("w"), all_threads=True)
    heartbeat = Heartbeat(beat_path(folder, rank))
    heartbeat.enter("starting")
    return heartbeat


def beat_path(folder: Path, rank: int) -> Path:
    """Return the path of the page on which worker `rank` writes what it does."""
    return folder / f"heartbeat-{rank}"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """Return what worker `rank` did last; None if it has not begun."""
    try:
        page = beat_path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    return Beat.read(page) if page else None


def leave_failure(folder: Path, failure: Failure) -> None:
    """Write `failure` for the launcher."""
    save_record(failure, folder / f"failure-{failure.rank}.json")


class LocalWatch:
    """Reads the workers' heartbeats in `folder`."""

    def __init__(self, folder: Path, job: Job) -> None:
        self._folder, self._job = folder, job
        timeout_s = job.run_options.hang_timeout_s
        self._detector = HangDetector([stage.ranks for stage in job.plan.stages], timeout_s)
        self._interval_s, self._due_s = min(_WATCHED_S, timeout_s / 5), 0.0

    def look(self, pids: Sequence[int]) -> None:
        """If a worker hangs, leave its failure and kill it; looks every half second.

        Args:
            pids: of the workers' processes, by rank: one that has not begun to write its page may hang, too.
        """
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + self._interval_s
        beats = {rank: read_beat(self._folder, rank) or Beat.none_yet(pid) for rank, pid in enumerate(pids)}
        hang = self._detector.look({rank: look_at(beat) for rank, beat in beats.items()}, time.monotonic())
        if hang is None:
            return
        place = self._place(hang.rank, pids[hang.rank]) if hang.busy else None
        # The reason comes before the kill, after which the launcher looks for one.
        leave_failure(self._folder, hang.failure(place))
        with suppress(ProcessLookupError):
            os.kill(pids[hang.rank], signal.SIGKILL)

    def _place(self, rank: int, pid: int) -> str | None:
        path = _dump_path(self._folder, rank)
        if not path.exists():  # no handler yet: the signal would end the process
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, _DUMP_SIGNAL)
        deadline, before, dump = time.monotonic() + _DUMP_S, "", ""
        # A worker that gets little of a core may still be writing.
        while (not dump or dump != before) and time.monotonic() < deadline:
            time.sleep(0.1)
            before, dump = dump, path.read_text(encoding="utf-8", errors="replace")
        return place_in_dump(dump, self._job)


def place_in_dump(dump: str, job: Job) -> str | None:
    """Return where a worker is, from faulthandler's dump of all threads; None for an empty dump.

    It has the main thread last, and each thread's innermost frame first.
    """
    threads = [_FRAME.finditer(thread) for thread in reversed(dump.split("most recent call first"))]
    return innermost(
        [[(frame["file"], int(frame["line"]), frame["function"]) for frame in frames][::-1] for frames in threads], job
    )


def explain(exit_codes: Mapping[int, int], folder: Path, job: Job) -> WorkersFailedError:
    """Return the first cause of a failed run.

    Candidates, in this order: the first worker's own error; a signal, except SIGTERM, with which the launcher itself
    ends the remaining workers; a lost connection; an exit code alone.

    Args:
        exit_codes: by rank, of the workers that failed; negative for a signal.
        folder: with the workers' failures and heartbeats.
        job: that they ran.
    """
    paths = sorted(folder.glob("failure-*.json"), key=lambda path: path.stat().st_mtime_ns)
    left = [Failure.model_validate_json(path.read_text("utf-8")) for path in paths]
    # A stable sort: the first worker's own error, or else the first consequence of one.
    left.sort(key=lambda failure: failure.consequence)
    signals = [rank for rank, code in sorted(exit_codes.items()) if code < 0 and code != -signal.SIGTERM]
    if left and not (left[0].consequence and signals):
        return error_of(left[0])
    rank = min(signals or exit_codes)
    beat = read_beat(folder, rank) if signals else None
    hint = "look for the reason in its last messages"
    ended = f"ended with exit code {exit_codes[rank]} and left no reason"
    if signals:
        name = signal.Signals(-exit_codes[rank]).name
        ended = f"was killed by {name}, {'while starting' if beat is None else beat.describe()}"
        if name == "SIGKILL":
            hint = "the system ends processes that exhaust its memory; see the kernel's log"
    message = f"{worker_name(rank, stage_of(job, rank, beat))} {ended}"
    return WorkersFailedError(message, hint=hint, exit_code=WorkerError.exit_code, again=True)


def _dump_path(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        InputError: when there is no such interface, or it has no IPv4 address.
    """
    if interface == LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"'{interface}' is no network interface with an IPv4 address here", hint=f"interfaces here: {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within this context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_workers(module: str, job: Job, on_timeline: Callable[[Timeline], None] | None = None) -> TrainResult:
    """Start the workers of `job` on this host, one process each, and wait for their end.

    Args:
        module: what each process runs, with the path of the job as its argument.
        job: the run; its `folder` is set here.
        on_timeline: is given what all workers did, if the job asks for a trace.

    Raises:
        WorkersFailedError: why the first worker failed; all others have ended by then.
    """
    interface = job.run_options.interface or os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK).split(",")[0]
    address = address_of(interface)
    with tempfile.TemporaryDirectory(prefix="plan-train-") as name, socket.create_server((address, 0)) as listening:
        folder, port, workers = Path(name), listening.getsockname()[1], str(job.plan.workers)
        job = job.model_copy(update={"folder": name})
        save_record(job, folder / "job.json")
        # Detached, because the store closes the socket, when it is freed. Without libuv: with it, the store of PyTorch
        # 2.7 takes no socket that listens already.
        store = TCPStore(
            address, port, is_master=True, timeout=_TIMEOUT, master_listen_fd=listening.detach(), use_libuv=False
        )
        defaults = {"OMP_NUM_THREADS": "1", **CUDA_VARIABLES}
        variables = {
            **{name: value for name, value in defaults.items() if name not in os.environ},
            **dict.fromkeys(VARIABLES, interface),
            LAUNCHER_VARIABLE: str(os.getpid()),
            # Those of torchrun that workers read.
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
            "GROUP_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-m", module, str(folder / "job.json")]
        try:
            with _told_of_signals():
                failed = _run(command, variables, job.plan.workers, LocalWatch(folder, job))
        finally:
            del store  # which lives as long as the workers
        if failed:
            error = explain(failed, folder, job)
            raise error from error.__cause__
        if not (result_path := folder / RESULT_FILE).exists():
            raise WorkerError("the workers ended without an error and without a result")
        if on_timeline is not None and (timeline_path := folder / TIMELINE_FILE).exists():
            on_timeline(load_timeline(timeline_path))
        return TrainResult.model_validate_json(result_path.read_text(encoding="utf-8"))


@contextmanager
def _told_of_signals() -> Iterator[None]:
    """Let the signals that end this process end the workers first; Ctrl-C does so by itself."""

    def end(number: int, _: object) -> NoReturn:
        raise WorkerError(f"training was ended by {signal.Signals(number).name}")

    main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP) if main}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _run(command: Sequence[str], variables: Mapping[str, str], workers: int, watch: LocalWatch) -> dict[int, int]:
    """Run `command` once per worker, until all have ended or one has failed; then end the others.

    Returns:
        The exit codes of the workers that failed, by rank; negative for a signal.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(workers):
            own = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of its own, so that what a worker starts ends with it, and Ctrl-C is the launcher's affair.
            processes.append(subprocess.Popen(command, env=own, start_new_session=True))
        while True:
            codes = [process.poll() for process in processes]
            failed = {rank: code for rank, code in enumerate(codes) if code}
            if failed or None not in codes:
                return failed
            watch.look([process.pid for process in processes])
            time.sleep(_LOOK_S)
    finally:
        left = [process for process in processes if process.poll() is None]
        for process in left:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _SHUTDOWN_S
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in left:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
                process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
