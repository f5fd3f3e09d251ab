"""How workers meet.

Slurm's variables as torchrun's.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import pytest

# PyTorch exports both by a star import.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from planner.errors import WorkerError
from planner.workers.job import LAUNCHER_VARIABLE
from planner.workers.meeting import (
    exchange,
    first_node,
    started_as_worker,
    worker_store,
    worker_variables,
)
from planner.workers.place import own_seat

# As srun sets them for the second task on the second of three nodes: 2, 2 and 1 tasks, in a job of
# 8.
TASK = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
    "SLURM_STEP_NODELIST": "gpu[04,06-07]",
}


def test_a_task_is_a_worker() -> None:
    assert worker_variables(TASK) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu04",
        "MASTER_PORT": str(12000 + (4711 * 7 + 2) % 20000),
        "TORCHELASTIC_RUN_ID": "slurm-4711",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    last = worker_variables(
        {**TASK, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    )
    assert last["LOCAL_WORLD_SIZE"] == "1"


def test_without_a_step_the_jobs_variables_count() -> None:
    job = {
        name: value for name, value in TASK.items() if "STEP" not in name and name != "ENVIRONMENT"
    }
    variables = worker_variables(
        {**job, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "SLURM_RESTART_COUNT": "1"}
    )
    assert variables["WORLD_SIZE"] == "8"
    assert variables["LOCAL_WORLD_SIZE"] == "4"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert variables["TORCHELASTIC_RESTART_COUNT"] == "1"  # requeued: it resumes
    del job["SLURM_TASKS_PER_NODE"]
    assert worker_variables(job)["LOCAL_WORLD_SIZE"] == "8"
    assert worker_variables({**job, "SLURM_NTASKS_PER_NODE": "4"})["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1
        # the batch script itself
        {name: value for name, value in TASK.items() if "STEP" not in name},
        # the shell of salloc
        {name: value for name, value in TASK.items() if name != "SLURM_PROCID"},
    ],
)
def test_what_is_no_task_among_others_is_no_worker(environment: dict[str, str]) -> None:
    assert worker_variables(environment) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,7],cpu1", "gpu03"),
        ("rack[1-2]node[3,9]-ib,x", "rack1node3-ib"),
        ("gpu[7]", "gpu7"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_worker_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1)
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorkerError, match=r"^worker 1 did not come in time"):
        exchange(PrefixStore("start", store), own_seat())


def test_all_hear_what_each_says(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9)
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    mine = own_seat({"steps": "`steps=5`"})
    assert exchange(store, mine) == [mine]
    assert (mine.server, mine.gpus, mine.same) == (3, (), {"steps": "`steps=5`"})


def test_a_start_of_an_elastic_run_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens: its agent has opened it, and counts only the failures of its own
    workers.
    """
    place = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in {
        **place,
        LAUNCHER_VARIABLE: os.getppid(),
        "TORCHELASTIC_RESTART_COUNT": 3,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert started_as_worker()
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def _meet_at(ports: Sequence[int], rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for number, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        assert number or started_as_worker()  # a later run of the same process need not ask again
        assert [
            seat.rank for seat in exchange(worker_store(timedelta(seconds=30)), own_seat())
        ] == [0, 1]


def test_processes_that_met_at_one_address_meet_at_another() -> None:
    """Worker 0 took the store that it had opened itself for torchrun's, and waited for one at the
    second address.
    """
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, other)]
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_meet_at, args=(ports, rank), daemon=True) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(90)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0, 0]
