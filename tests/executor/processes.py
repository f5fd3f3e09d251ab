"""Run several training jobs in one set of real worker processes: starting processes takes longer
than the jobs.

The processes are forked from one that has imported the package already, which takes longer than
most runs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner import hashes
from planner.executor.communication.control import join_group
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.train import train
from planner.formats.timeline import save_timeline
from planner.model.spec import load_model_file
from planner.workers.job import Job, TrainResult
from planner.workers.place import CPU
from tests.executor.known_captures import capture_ahead, each_captured_once

TIMEOUT_S = 240
ENDING_S = 30  # for workers that are ended after that
_HOST = "127.0.0.1"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    hashes.VARIABLE: hashes.SEED,  # as workers have that are launched
}


def run_jobs(jobs: Sequence[Job], folder: Path) -> list[TrainResult]:
    """Run `jobs`, which all need the same number of workers, one after the other in the environment
    of torchrun.
    """
    paths = []
    for index, job in enumerate(jobs):
        path = folder / f"job-{index}.json"
        path.write_text(job.model_dump_json(), encoding="utf-8")
        paths.append(str(path))
    run_workers(_run, paths, folder / "workers.log", jobs[0].plan.workers, jobs=jobs)
    return [
        TrainResult.model_validate_json(Path(f"{path}.result").read_text("utf-8")) for path in paths
    ]


def run_workers(
    run: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    log: Path,
    world: int,
    *,
    jobs: Sequence[Job] = (),
    left_s: float | None = None,
) -> None:
    """Call `run` with the arguments in so many worker processes, in the environment of torchrun.

    The models of `jobs` are captured before, once for all workers.
    """
    store = TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    common = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": store.port,
    }
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    variables = os.environ | _ENVIRONMENT | {name: str(value) for name, value in common.items()}
    texts = [job.model_dump_json() for job in jobs]
    leader = _warm().Process(target=_lead, args=(texts, run, arguments, log, variables, left_s))
    log.touch()
    leader.start()
    assert leader.pid is not None
    try:
        leader.join(TIMEOUT_S + ENDING_S)
        assert leader.exitcode == 0, f"exit code {leader.exitcode}:\n{log.read_text('utf-8')}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)  # what is left of its workers, too
        leader.join()


def _lead(
    jobs: Sequence[str],
    run: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    log: Path,
    variables: dict[str, str],
    left_s: float | None,
) -> None:
    """Capture the models of jobs, fork the workers, and exit with 1 where one of them fails."""
    os.setsid()
    gc.freeze()  # what the process before had imported; collections take half a second otherwise
    torch.set_num_threads(1)
    for job in jobs:
        capture_ahead(Job.model_validate_json(job))

    workers = [
        multiprocessing.get_context("fork").Process(
            target=_worker,
            args=(run, arguments, log, variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
        )
        for rank in range(int(variables["WORLD_SIZE"]))
    ]
    try:
        run_to_end(workers, log, left_s=left_s)
    except AssertionError:
        sys.exit(1)  # the log says why


def run_to_end(
    workers: Sequence[BaseProcess],
    log: Path,
    *,
    may_fail: bool = False,
    left_s: float | None = None,
) -> None:
    """Start workers and wait for their ends, in time and, unless they may fail, without an error;
    leave none behind.

    Args:
        workers: not started yet.
        log: what they print.
        may_fail: whether they may end with an error.
        left_s: how long the others may go on when one has failed, as a launcher ends them; None: as
            long as they need.
    """
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while running := [worker for worker in workers if worker.exitcode is None]:
            if time.monotonic() >= deadline:
                break
            wait([worker.sentinel for worker in running], deadline - time.monotonic())
            if left_s is not None and any(worker.exitcode for worker in workers):
                deadline = min(deadline, time.monotonic() + left_s)

        codes = [worker.exitcode for worker in workers]
        if left_s is not None and any(codes):
            return  # the others waited for the one that failed
        for code in codes:
            ended = code == 0 or (may_fail and code is not None)
            assert ended, f"exit code {code}:\n{log.read_text('utf-8')}"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@cache
def _warm() -> ForkServerContext:
    """Start the process from which workers are forked."""
    context = multiprocessing.get_context("forkserver")
    torch_parts = [
        f"torch.{part}" for part in ("export", "_dynamo", "_inductor", "distributed.tensor")
    ]
    context.set_forkserver_preload(
        ["planner.executor.run.train", *torch_parts, "tests.executor.one_capture"]
    )
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _worker(
    run: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    log: Path,
    variables: dict[str, str],
) -> None:
    os.environ.update(variables)
    gc.freeze()  # what the process before had imported; collections take half a second otherwise
    torch.set_num_threads(1)
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            with each_captured_once():
                run(arguments)
        except BaseException:
            traceback.print_exc()
            raise


def _run(paths: Sequence[str]) -> None:
    joined = False
    for path in paths:
        job = Job.model_validate_json(Path(path).read_text("utf-8"))
        if not joined:
            join_group()
            joined = True
        context = pipeline_context(job, load_model_file(job.model), CPU)
        result = train(context, on_timeline=partial(save_timeline, path=f"{path}.timeline"))
        if result is not None:
            Path(f"{path}.result").write_text(result.model_dump_json(), encoding="utf-8")
    torch.distributed.destroy_process_group()
