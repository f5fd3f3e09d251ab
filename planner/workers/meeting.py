"""How workers meet: through a store, before they choose a GPU, build a model on it, and make
process groups.

Under Slurm without torchrun srun numbers its tasks as torchrun does, and its variables are
translated (see srun(1), "OUTPUT ENVIRONMENT VARIABLES"). There, and where mpirun or an operator
sets RANK, WORLD_SIZE and MASTER_*, the first worker holds the store that torchrun would.
"""

import atexit
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache, lru_cache

import torch.distributed as dist

# PyTorch exports both by a star import.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from planner.errors import InputError, WorkerError, first_line
from planner.workers.interfaces import choose_interface, listening_address
from planner.workers.job import LAUNCHER_VARIABLE
from planner.workers.place import Seat
from planner.workers.secret_store import Part, group_keys, protected, read_record
from planner.workers.store_server import open_store

# Below the ports that Linux gives to outgoing connections (32768 and up), so that none of those is
# in the way.
_FIRST_PORT = 12000
_PORTS = 20000
_TIMEOUT = timedelta(minutes=10)
_TASKS = re.compile(r"(?P<tasks>\d+)(\(x(?P<nodes>\d+)\))?")
_COUNT = "TORCHELASTIC_RESTART_COUNT"
_ANSWERS_EVERY_S = 0.05
_ANSWER_S = 3.0  # how long calls of the store may take when the process ends


def worker_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of Slurm; none outside Slurm, and none for a single
    task.
    """
    rank = environment.get("SLURM_PROCID")
    tasks = _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    # A batch script has the variables of task 0, but is not one of the tasks: those are of the
    # steps that it starts.
    batch_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if rank is None or tasks is None or int(tasks) < 2 or batch_script:
        return {}
    node = environment.get("SLURM_NODEID", "0")
    job = environment.get("SLURM_JOB_ID", "0")
    step = environment.get("SLURM_STEP_ID", "0")
    # steps of one job may run at the same time
    port = _FIRST_PORT + (int(job) * 7 + int(step)) % _PORTS
    nodes = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return {
        "RANK": rank,
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_local_tasks(environment, int(node), int(tasks))),
        "GROUP_RANK": node,
        "MASTER_ADDR": environment.get("MASTER_ADDR")
        or (first_node(nodes) if nodes else "127.0.0.1"),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
        # A job that Slurm requeues continues from its checkpoints, as workers do that torchrun
        # restarts.
        "TORCHELASTIC_RUN_ID": f"slurm-{job}",
        _COUNT: environment.get("SLURM_RESTART_COUNT", "0"),
    }


def first_node(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu03" of "gpu[03-05,7],cpu1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        return nodes
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


# of a list such as "4(x2),1"
def _local_tasks(environment: Mapping[str, str], node: int, tasks: int) -> int:
    listed = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if listed is None:
        return int(environment.get("SLURM_NTASKS_PER_NODE", tasks))
    counts = [
        int(found["tasks"])
        for found in _TASKS.finditer(listed)
        for _ in range(int(found["nodes"] or 1))
    ]
    if node < len(counts):
        return counts[node]
    return counts[-1]


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    # A step's variables come before the job's, which may be larger.
    return next((environment[name] for name in names if environment.get(name)), None)


def started_as_worker() -> bool:
    """Return whether this process is one of several workers; Slurm's environment then becomes
    torchrun's.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        os.environ.update(worker_variables(os.environ))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    if (
        missing := {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    ) and not dist.is_initialized():
        problem = (
            f"the environment has RANK and WORLD_SIZE of a worker, and no "
            f"{' and no '.join(sorted(missing))}"
        )
        raise InputError(
            problem,
            hint="set worker 0's host and a free port of it for all; or start with torchrun",
        )

    # an agent of ours, which has opened a store for this start alone
    if LAUNCHER_VARIABLE in os.environ:
        os.environ[_COUNT] = "0"
    elif not missing:
        _open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    return True


# which ends with this process, where no agent of torchrun outlives it
_own_store: TCPStore | None = None


@cache  # once for a store, however many pipelines are trained by it
def _open_store(host: str, port: int) -> None:
    global _own_store
    rank = int(os.environ["RANK"])
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        if opens:
            store = _listen(host, port)
        else:
            store = TCPStore(host, port, wait_for_workers=False, timeout=_TIMEOUT)
        _agree_on_start(Part("planner", protected(store)), rank, int(os.environ["WORLD_SIZE"]))
    except RuntimeError as cause:
        done = "opened" if opens else "reached"
        raise WorkerError(
            f"the store at {host}:{port}, where worker {rank} meets others, cannot be {done}: "
            f"{first_line(cause)}",
            hint="did worker 0 start? MASTER_ADDR and MASTER_PORT choose another address of its "
            "host, and another port",
        ) from cause

    if opens:
        _own_store = store


def _listen(host: str, port: int) -> TCPStore:
    """Open the store that others reach at `host`: on that address alone, where this machine
    has it.
    """
    address = listening_address(
        host, elsewhere=os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]
    )
    if address is not None:
        # in use: by this process, perhaps, which has met others there before
        with suppress(OSError):
            return open_store(address, port, _TIMEOUT)

    # Multi-tenant: what else worker 0 opens at this address is the same store.
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, multi_tenant=True
    )


def _agree_on_start(store: Store, rank: int, world: int) -> None:
    """Set torchrun's number of restarts to one that all workers of this start have, and no earlier
    start had.

    Each of torchrun's agents counts the failures of its own workers alone. So worker 0 counts in
    the store, which keeps what earlier starts have written, and tells its number to whoever
    arrives.
    """
    if rank == 0:
        number = store.add("starts", 1) - 1
        # of an agent or a job whose store is new
        if (own := int(os.environ.get(_COUNT, "0"))) > number:
            number = store.add("starts", own - number) - 1
        _answer_in_thread(store, number, world)
    else:
        number = int(store.get(f"start of {store.add('arrivals', 1)}"))
        store.set(f"{number}/{rank}", "")

    os.environ[_COUNT] = str(number)


def _answer_in_thread(store: Store, number: int, world: int) -> None:
    """Answer all workers that arrive, until they are here or the process ends.

    An interpreter that ends while a thread is in a call of the store aborts the process. So the
    thread is ended before.
    """
    ending = threading.Event()
    thread = threading.Thread(
        target=_answer, args=(store, number, world, ending), name="arrivals", daemon=True
    )
    thread.start()

    def end() -> None:
        ending.set()
        thread.join(_ANSWER_S)

    atexit.register(end)


def _answer(store: Store, number: int, world: int, ending: threading.Event) -> None:
    answered = 0
    all_here = False
    with suppress(RuntimeError):  # the store is gone: each worker finds that out
        while not all_here and not ending.is_set():
            for arrival in range(answered + 1, (answered := store.add("arrivals", 0)) + 1):
                store.set(f"start of {arrival}", str(number))
            ending.wait(_ANSWERS_EVERY_S)
            all_here = store.check([f"{number}/{rank}" for rank in range(1, world)])


def hold_store(seconds: float) -> None:
    """Let the others read for so long why this worker ends, if it holds the store that
    tells them.
    """
    if _own_store is not None:
        time.sleep(seconds)


def worker_store(timeout: timedelta) -> Store:
    """Return the store by which the workers meet: that of the process group, where there is one
    already.
    """
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()
        return protected(store)
    store = protected(_rendezvous(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"))
    store.set_timeout(timeout)
    return _of_this_start(store)


def group_store(timeout: timedelta) -> Store:
    """Return the part of the same store for PyTorch's process groups, which no HMAC protects."""
    store = _rendezvous(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    store.set_timeout(timeout)
    return _of_this_start(group_keys(store))


@lru_cache(maxsize=1)
def _rendezvous(address: str) -> Store:
    # Once per address: worker 0 may have to open it.
    store: Store = next(rendezvous("env://", timeout=_TIMEOUT))[0]
    return store


def _of_this_start(store: Store) -> Store:
    # torchrun keeps its store when it restarts the workers, and in it the addresses of those that
    # have ended. So each start uses its own keys.
    return Part(f"start_{os.environ.get(_COUNT, '0')}", store)


def exchange(store: Store, mine: Seat) -> list[Seat]:
    """Tell all workers about this one, choose a network interface by what all say, and return that
    by rank.
    """
    prefix = f"seat/{nth_time(store, 'seat')}"
    seats = list[Seat]()
    store.set(f"{prefix}/{mine.rank}", mine.model_dump_json())
    try:
        for rank in range(int(os.environ["WORLD_SIZE"])):
            seats.append(read_record(store, f"{prefix}/{rank}", Seat))
    except dist.DistStoreError as cause:  # a time-out; a store that is lost raises DistNetworkError
        raise WorkerError(
            f"worker {len(seats)} did not come in time",
            hint="is the command started on all hosts, with the same plan?",
        ) from cause

    choose_interface([seat.address for seat in seats], mine.rank)
    return seats


def nth_time(store: Store, what: str) -> int:
    """Count how often this worker has done `what` by this store, now included, for keys that are
    not used again.
    """
    return int(store.add(f"{what}/times/{os.environ['RANK']}", 1))


def await_all(what: str) -> None:
    """Wait until all workers have called this, however long that takes: a hang shows in their
    heartbeats.
    """
    world = int(os.environ["WORLD_SIZE"])
    store = worker_store(_TIMEOUT)
    key = f"{what}/{nth_time(store, what)}"
    if store.add(key, 1) == world:
        store.set(f"{key}/all", "")
    while not store.check([f"{key}/all"]):  # a wait in the store would have a limit
        time.sleep(0.002 * world)  # so many of them ask one store
