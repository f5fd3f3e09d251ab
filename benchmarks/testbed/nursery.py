"""Import PyTorch once, and fork a worker into each host, because 16 imports would take a minute.

    python -m benchmarks.testbed.nursery

It reads one JSON object per line, first the hosts' names and whether they run ahead of other work,
then tasks. It answers each with one line: the result of worker 0 or an error. It ends when its
standard input ends, and its workers end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.netns import INTERFACE
from benchmarks.testbed.buckets import scaled_buckets
from planner.executor.run.train import train_worker
from planner.formats.timeline import Timeline
from planner.profiler.links.measure_cluster import measure_cluster
from planner.profiler.this_machine import keep_freed_pages
from planner.reporting.trace import save_trace
from planner.workers.job import Job

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve tasks until standard input ends."""
    die_with_parent()
    torch.set_num_threads(1)
    keep_freed_pages()  # as the product's workers do
    started = json.loads(sys.stdin.readline())
    context = multiprocessing.get_context("fork")
    workers: list[tuple[Any, Connection]] = []
    for rank, host in enumerate(started["hosts"]):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_worker, args=(rank, host, theirs, started["ahead"]), daemon=True
        )
        process.start()
        theirs.close()
        workers.append((process, ours))
    _say({"ready": len(workers)})
    for line in sys.stdin:
        task = json.loads(line)
        _say(_serve(task, [connection for _, connection in workers[: task["world"]]]))
    for process, _ in workers:
        process.kill()


def _serve(task: dict[str, Any], connections: list[Connection]) -> dict[str, Any]:
    """Give the task to the workers; return the answer of the first one, or the first failure."""
    for connection in connections:
        connection.send(task)
    result: dict[str, Any] = {}
    pending = dict(enumerate(connections))
    while pending:
        for ready in wait(list(pending.values())):
            rank = next(number for number, connection in pending.items() if connection is ready)
            del pending[rank]
            try:
                answer = connections[rank].recv()
            except EOFError:
                answer = {"error": "it died"}
            if "error" in answer:
                return {"error": f"worker {rank}: {answer['error']}"}
            if rank == 0:
                result = answer
    return result


def _worker(rank: int, namespace: str, connection: Connection, ahead: bool) -> None:
    """Join the host's network, then run tasks until the nursery ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.close()
    if ahead:
        _run_ahead()
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE, RANK=str(rank), LOCAL_RANK="0")
    with contextlib.suppress(EOFError):
        while True:
            task = connection.recv()
            try:
                connection.send(_run(task))
            except BaseException as error:  # reported to the nursery, which gives up
                connection.send({"error": f"{error}\n{traceback.format_exc()}"})
    os._exit(0)  # gloo's teardown sometimes hangs


def _run(task: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(
        WORLD_SIZE=str(task["world"]),
        LOCAL_WORLD_SIZE=str(task["per_server"]),
        MASTER_ADDR=task["address"],
        MASTER_PORT=str(task["port"]),
    )
    with scaled_buckets(task["byte_factor"]):
        match task["kind"]:
            case "links":
                return _links(task)
            case "train":
                return _train(Job.model_validate(task["job"]))
            case kind:
                raise ValueError(f"unknown task '{kind}'")


def _links(task: dict[str, Any]) -> dict[str, Any]:
    message_bytes = task["message_bytes"]
    cluster = measure_cluster(
        message_bytes=message_bytes, bucket_bytes=message_bytes, budget_s=task["budget_s"]
    )
    return {} if cluster is None else cluster.model_dump(mode="json")


def _train(job: Job) -> dict[str, Any]:
    def keep(timeline: Timeline) -> None:
        assert job.run_options.trace is not None
        save_trace(timeline, job.run_options.trace)

    result = train_worker(job, on_timeline=keep)
    return {} if result is None else result.model_dump(mode="json")


def _run_ahead() -> None:
    """Run before all other work of the machine, which no device waits for, if the user may.

    Threads that are made later do as well.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def die_with_parent() -> None:
    """End this process when its parent does, even by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
