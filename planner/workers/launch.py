"""Start the workers on this host through torchrun's launcher, and say why one failed.

Workers and agents meet in a store that listens on one address and asks for the secret of the run:
see `planner.workers.rendezvous`.
"""

import logging
import math
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

# PyTorch exports both by a star import.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner import hashes
from planner.errors import InputError, WorkerError
from planner.formats.files import replace, save_record
from planner.formats.held_folder import held_folder, remove_abandoned
from planner.formats.late import noting
from planner.formats.timeline import Timeline, load_timeline
from planner.workers.failures import WorkersFailedError, error_of, stage_of, worker_name
from planner.workers.handing import handing_over
from planner.workers.interfaces import LOOPBACK, VARIABLES, address_of, address_towards
from planner.workers.job import (
    LATE_VARIABLE,
    LAUNCHER_VARIABLE,
    TIMELINE_FILE,
    Failure,
    Job,
    TrainResult,
)
from planner.workers.place import GPU_VARIABLES
from planner.workers.rendezvous import HOSTS, JOIN_S, NO_SHARED_STORE, ONE_HOST
from planner.workers.result import result_in
from planner.workers.secret import SECRET_VARIABLE, default_file, new_secret, secret_of_hosts
from planner.workers.secret_store import ForgedValueError, read_record
from planner.workers.signals import ended_by_signals, ending_signals
from planner.workers.store_server import is_free, open_store
from planner.workers.watch import MEMORY_HINT, cause_in, failure_key, last_beat, own_keys

# seconds from SIGTERM to SIGKILL, for the workers that are left when one has failed
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_S = "10"
END_S = 1  # how long workers have to end when a start does
FAULTS = 100  # of its own workers that a host survives


def environment(variables: Mapping[str, str]) -> AbstractContextManager[object]:
    """Set variables of the environment, and put back what was there."""
    return cast("AbstractContextManager[object]", patch.dict(os.environ, variables))


def run_workers(
    module: str,
    job: Job,
    on_timeline: Callable[[Timeline], None] | None = None,
    model: bytes | None = None,
) -> TrainResult:
    """Start the workers of `job` on this host, one process each that runs `module`, and wait for
    their end; hand them the `model`, if it is in memory.

    Raise WorkersFailedError with why the first worker failed; all others have ended by then.
    """
    interface = (
        job.run_options.interface or os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK).split(",")[0]
    )
    store = open_store(address_of(interface), 0)
    with ended_by_signals(), held_folder("train") as folder:
        job = replace(job, folder=str(folder))
        job_path = folder / "job.json"
        timeline_path = folder / TIMELINE_FILE
        save_record(job, job_path)
        first: dict[int, int] = {}
        secret = new_secret()
        with (
            handing_over(model, folder, secret),
            launching(interface, **{SECRET_VARIABLE: secret}),
            _telling_first(first.update),
        ):
            try:
                start_workers(store, job.plan.workers, (module, str(job_path)), str(folder))
            except ChildFailedError as cause:
                remove_abandoned(Path(job.elastic.copy_folder))  # killed while the run moved
                exit_codes = {rank: process.exitcode for rank, process in cause.failures.items()}
                error = explain(exit_codes, own_keys(store), job, first)
                raise error from error.__cause__
            result = result_in(own_keys(store))

        if result is None:
            raise WorkerError("the workers ended without an error and without a result")
        late = list(result.late_failures)
        if on_timeline is not None and timeline_path.exists():
            with noting(late):
                on_timeline(load_timeline(timeline_path))
        return replace(result, late_failures=tuple(late))


def start_workers(store: TCPStore, workers: int, command: Sequence[str], folder: str) -> None:
    """Start `command`, a module and its arguments, as workers that meet in `store`, and wait for
    their end.

    Within `launching`, because PyTorch reads the time for shutting down from the environment. Raise
    ChildFailedError when a worker failed; all others have ended by then.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend=ONE_HOST,
        rdzv_configs={"store": store},
        local_addr=store.host,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        max_restarts=0,
        monitor_interval=0.1,
        **_signals(),
    )
    elastic_launch(config, sys.executable)("-m", *command)


def run_on_hosts(job: Job, command: Sequence[str], note: Callable[[str], None]) -> int:
    """Start `command` as this host's workers of an elastic run, each time anew that hosts are lost
    or come.

    torchrun's agents, one of which this process becomes, agree on who is there. `note` is told
    which of this host's workers were killed, and so left no reason. Return the exit code: 1 where
    something that was asked for could not be written. Raise WorkerError when this host's part of
    the run ends without a reason.
    """

    def tell(exit_codes: Mapping[int, int]) -> None:
        for rank, code in exit_codes.items():
            if code < 0:
                why = ""
                if code == -signal.SIGKILL:
                    why = f"; {MEMORY_HINT}"
                note(f"worker {rank} was {_ended_by(code)}{why}")

    least, most = job.elastic.hosts
    place = job.elastic.rendezvous or ""
    interface = job.run_options.interface
    host, _, port = place.rpartition(":")
    own = address_of(interface) if interface else address_towards(host)
    if own is None:
        raise InputError(
            f"no way leads to the host of `rendezvous={place}`", hint="is its name known here?"
        )

    variables = {
        # All hosts have as many workers, so agents need not ask each other for these, and wait for
        # one that is lost.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
        **NO_SHARED_STORE,
        SECRET_VARIABLE: secret_of_hosts(secret_file(job)),
    }
    with ended_by_signals(), held_folder("train") as folder:
        late = folder / "late"
        # What a start ends has nothing more to do. One that is stopped does not end before SIGKILL.
        with (
            launching(interface, **variables, **{LATE_VARIABLE: str(late)}),
            _telling_first(tell, END_S),
        ):
            config = LaunchConfig(
                min_nodes=least,
                max_nodes=most,
                nproc_per_node=job.plan.cluster.gpus // most,
                run_id=job.run,
                rdzv_backend=HOSTS,
                rdzv_endpoint=place,
                rdzv_configs={
                    "is_host": own == socket.gethostbyname(host) and is_free(own, int(port))
                },
                local_addr=own,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
                max_restarts=FAULTS,
                monitor_interval=0.1,
                **_signals(),
            )
            try:
                elastic_launch(config, sys.executable)("-m", *command)
            except ChildFailedError:
                raise WorkerError(
                    f"this host's workers failed {FAULTS} times", hint="see their messages"
                ) from None
            except RendezvousError as cause:
                raise _not_met(cause, job) from None
        return int(late.exists())


def _not_met(cause: RendezvousError, job: Job) -> WorkerError:
    """Return why hosts did not meet, or meet no more."""
    least, _ = job.elastic.hosts
    if isinstance(cause.__cause__, ForgedValueError):
        return cause.__cause__
    if isinstance(cause, RendezvousClosedError):
        return WorkerError("the run has ended on the other hosts", hint="see their messages")
    if isinstance(cause, RendezvousTimeoutError):
        return WorkerError(
            f"fewer than {least} hosts have come in {JOIN_S} s", hint="start more of them"
        )

    return WorkerError(
        f"the store at {job.elastic.rendezvous}, where hosts meet, is not reached: the run has "
        f"ended, or that host is "
        "lost",
        hint=f"in its place name another host as `rendezvous`: all have copies in "
        f"{job.elastic.copy_folder}",
    )


_close = PContext.close


@contextmanager
def _telling_first(
    tell: Callable[[Mapping[int, int]], None], most_s: float = math.inf
) -> Iterator[None]:
    """Tell the exit codes, by rank, of the workers of a start that failed before the launcher ended
    the others.

    torchrun has no interface for that (read in 2.7 and 2.13): it closes the others inside the poll
    that finds the first failure, adds their exit codes to its own, with times in whole seconds, and
    tells nothing at all of a start that it tries again. In that poll the others have 30 seconds to
    end, whatever the environment says: what is read from there holds for an agent that is ended by
    a signal. So `PContext.close`, which is public, is replaced while a run lasts, and reads the
    failures that are known by then.

    Args:
        tell: called once for a start, with no exit code where none has failed.
        most_s: how long the others have to end, at most; never longer than the environment says.
    """
    closed: list[PContext] = []
    limit_s = int(min(most_s, int(os.environ[SHUTDOWN_VARIABLE])))

    def close(
        workers: PContext, death_sig: signal.Signals | None = None, timeout: int = 30
    ) -> None:
        if workers not in closed:  # later, those that were ended have failed, too
            closed[:] = [workers]
            failures = getattr(workers, "_failures", {})
            tell(
                {
                    int(workers.envs[local]["RANK"]): failure.exitcode
                    for local, failure in failures.items()
                }
            )

        _close(workers, death_sig, min(timeout, limit_s))

    with patch.object(PContext, "close", close):
        yield


def _signals() -> dict[str, Any]:
    """Return the argument of LaunchConfig for the signals that end a run, where this PyTorch has
    it.
    """
    if "signals_to_handle" not in {field.name for field in fields(LaunchConfig)}:
        return {}
    return {"signals_to_handle": ",".join(number.name for number in ending_signals())}


def _ended_by(exit_code: int) -> str:
    """Say which signal ended a process with this exit code: SIGTERM asks for an end, and others
    leave no choice.
    """
    name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGTERM:
        return f"ended by signal {name}"
    return f"killed by {name}"


def secret_file(job: Job) -> Path:
    """Return the file from which the hosts of a run get its secret, unless their environment has
    one.
    """
    chosen = job.elastic.secret_file
    if chosen is None:
        return default_file(job.run, str(job.elastic.rendezvous))
    return Path(chosen)


@contextmanager
def launching(interface: str | None, **more: str) -> Iterator[None]:
    """Let workers inherit one thread and one way to hash, unless the environment says otherwise,
    and one interface.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        hashes.VARIABLE: hashes.SEED,
        SHUTDOWN_VARIABLE: SHUTDOWN_S,
        **GPU_VARIABLES,
    }
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    chosen = {}
    if interface is not None:
        chosen = dict.fromkeys(VARIABLES, interface)
    with (
        _quiet_launcher(),
        environment({**variables, **chosen, LAUNCHER_VARIABLE: str(os.getpid()), **more}),
    ):
        yield


def explain(
    exit_codes: Mapping[int, int], store: Store, job: Job, first: Mapping[int, int] | None = None
) -> WorkersFailedError:
    """Return the first cause of a failed run, from what the workers wrote and their exit codes by
    rank.

    Candidates, in this order: the first worker's own error; a signal; a lost connection; an exit
    code alone. The launcher itself ends the remaining workers with SIGTERM, which counts for the
    `first` alone.
    """
    if (cause := cause_in(store)) is not None:
        return error_of(cause)
    from_outside = first or {}
    signals = [
        rank
        for rank, code in sorted(exit_codes.items())
        if code < 0 and (code != -signal.SIGTERM or rank in from_outside)
    ]
    left = [key for rank in sorted(exit_codes) if store.check([key := failure_key(rank)])]
    if left and not signals:
        return error_of(read_record(store, left[0], Failure))
    rank = min(signals or exit_codes)
    beat = last_beat(store, rank)
    hint = "look for the reason in its last messages"
    ended = f"ended with exit code {exit_codes[rank]} and left no reason"
    if signals:
        ended = (
            f"was {_ended_by(exit_codes[rank])}, last heard of "
            f"{'while starting' if beat is None else beat.doing}"
        )
        hints = {
            -signal.SIGKILL: MEMORY_HINT,
            -signal.SIGTERM: "it was sent from outside, by whoever manages this machine or its "
            "jobs",
        }
        hint = hints.get(exit_codes[rank], hint)

    message = f"{worker_name(rank, stage_of(job, rank, beat))} {ended}"
    return WorkersFailedError(message, hint=hint, exit_code=WorkerError.exit_code, again=True)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    # Each of its loggers, because some have a level of their own.
    names = [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]
    silenced = [logger for name in names if not (logger := logging.getLogger(name)).disabled]
    for logger in silenced:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in silenced:
            logger.disabled = False
