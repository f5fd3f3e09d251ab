"""How workers meet: through a store, before they choose a GPU, build a model on it, and make process groups.

Under Slurm without torchrun (`srun plan train ...`) srun starts one process per task and numbers them as torchrun does.
Its variables are translated to torchrun's (see the manual page srun(1), "OUTPUT ENVIRONMENT VARIABLES"), and the first
task holds the store that torchrun would hold.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.rendezvous import rendezvous

from planner.errors import WorkerError, first_line
from planner.workers.place import Seat

# Below the ports that Linux gives to outgoing connections (32768 and up), so that none of those is in the way.
_FIRST_PORT, _PORTS = 12000, 20000
_TIMEOUT = timedelta(minutes=10)
_COUNT = re.compile(r"(?P<tasks>\d+)(\(x(?P<nodes>\d+)\))?")

_store: TCPStore | None = None  # of this process; it ends with it


def become_worker() -> None:
    """Set torchrun's variables, if Slurm started this process as one of several tasks; open the store on the first.

    Raises:
        WorkerError: when the store cannot be opened, or not be reached.
    """
    global _store
    variables = worker_variables(os.environ)
    if not variables:
        return
    host, port, first = variables["MASTER_ADDR"], variables["MASTER_PORT"], variables["RANK"] == "0"
    try:
        # The others wait here until the first task has come: Slurm starts tasks when each node is ready.
        store = TCPStore(host, int(port), is_master=first, wait_for_workers=False, timeout=_TIMEOUT)
    except RuntimeError as cause:
        done = "opened" if first else "reached"
        raise WorkerError(
            f"the store of Slurm's first task, {host}:{port}, cannot be {done}: {first_line(cause)}",
            hint="MASTER_ADDR and MASTER_PORT choose another address of that task's node, and another port",
        ) from cause
    if first:
        _store = store
    os.environ.update(variables)


def hold_store(seconds: float) -> None:
    """Let the others read why this worker ends, if it holds the store that tells them; torchrun outlives its workers.

    Args:
        seconds: for which workers that lost a peer look for the cause.
    """
    if _store is not None:
        time.sleep(seconds)


def worker_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of Slurm; none outside Slurm, and none for a single task."""
    rank = environment.get("SLURM_PROCID")
    tasks = _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    # A batch script has the variables of task 0, but is not one of the tasks: those are of the steps that it starts.
    batch_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if rank is None or tasks is None or int(tasks) < 2 or batch_script:
        return {}
    node = environment.get("SLURM_NODEID", "0")
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    port = _FIRST_PORT + (int(job) * 7 + int(step)) % _PORTS  # steps of one job may run at the same time
    nodes = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return {
        "RANK": rank,
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_local_tasks(environment, int(node), int(tasks))),
        "GROUP_RANK": node,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or (first_node(nodes) if nodes else "127.0.0.1"),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
        # A job that Slurm requeues continues from its checkpoints, as workers do that torchrun restarts.
        "TORCHELASTIC_RUN_ID": f"slurm-{job}",
        "TORCHELASTIC_RESTART_COUNT": environment.get("SLURM_RESTART_COUNT", "0"),
        # Every worker connects to the store as to torchrun's, the first one too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def first_node(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu03" of "gpu[03-05,7],cpu1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else nodes


def _local_tasks(environment: Mapping[str, str], node: int, tasks: int) -> int:
    """Return how many tasks run on this node, of a list such as "4(x2),1"."""
    listed = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if listed is None:
        return int(environment.get("SLURM_NTASKS_PER_NODE", tasks))
    counts = [int(found["tasks"]) for found in _COUNT.finditer(listed) for _ in range(int(found["nodes"] or 1))]
    return counts[node] if node < len(counts) else counts[-1]


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    """Return the first of these variables that is set: a step's come before the job's, which may be larger."""
    return next((environment[name] for name in names if environment.get(name)), None)


def started_as_worker() -> bool:
    """Return whether torchrun, or Slurm without it, started this process as one of several workers.

    Slurm's environment becomes torchrun's, which everything else reads.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        become_worker()
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def worker_store(timeout: timedelta) -> Store:
    """Return the store by which the workers meet: that of the process group, where there is one already."""
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()
        return store
    return _rendezvous(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timeout)


@lru_cache(maxsize=1)
def _rendezvous(address: str, timeout: timedelta) -> Store:
    """Connect to the store that torchrun's environment describes, once per address: worker 0 may have to open it."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # With static rendezvous torchrun keeps its store when it restarts the workers, and in it the addresses of those
    # that have ended. So each start uses its own keys.
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def exchange(store: Store, mine: Seat) -> list[Seat]:
    """Tell all workers about this one, and return what all say, by rank; waits for the last, up to the store's limit.

    Raises:
        WorkerError: when a worker does not come.
    """
    prefix = f"seat/{nth_time(store, 'seat')}"
    store.set(f"{prefix}/{mine.rank}", mine.model_dump_json())
    return [_seat(store, f"{prefix}/{rank}", rank) for rank in range(int(os.environ["WORLD_SIZE"]))]


def nth_time(store: Store, what: str) -> int:
    """Count how often this worker has done `what` by this store, now included, for keys that are not used again.

    A script may train several pipelines, one after the other, and all workers do so in the same order.
    """
    count: int = store.add(f"{what}/times/{os.environ['RANK']}", 1)
    return count


def _seat(store: Store, key: str, rank: int) -> Seat:
    try:
        return Seat.model_validate_json(store.get(key))
    except dist.DistStoreError as cause:  # a time-out; a store that is lost raises DistNetworkError
        raise WorkerError(
            f"worker {rank} did not come in time",
            hint="is the command started on all hosts, with the same plan?",
        ) from cause
