"""A worker whose run failed ends within a bound, whatever blocks, and the next worker's end is
noticed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported by a star import

from planner.workers.ending import abort_groups, keep_failures_ours, within
from planner.workers.failures import memory_failure

TIMEOUT_S = 240

# Nobody ever sets the event.
BLOCKED = """
import atexit, threading, torch.distributed as dist
from torch.distributed import distributed_c10d
from planner.workers.ending import abort_groups, bound_exit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wait = lambda *_: threading.Event().wait()
dist.ProcessGroup.abort = distributed_c10d._abort_process_group = wait
def shut_down():  # as a library may
    print("shutting down", flush=True)
    threading.Event().wait()
atexit.register(shut_down)
abort_groups()
print("aborted")
bound_exit()
raise ValueError("the reason")
"""

# PyDLL keeps the interpreter's lock in the call, as a destructor in C++ may.
LOCKED = """
import ctypes
from planner.workers.ending import end_within
end_within(2.0)
ctypes.PyDLL(None).pause()
"""

# Worker 2 is killed. Worker 1, which watches it, is told; then it says goodbye, so that worker 0 is
# told nothing.
RING = """
import os, signal, sys, threading, torch.distributed as dist
from planner.workers.watch import NextWorker
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
told = threading.Event()
def on_gone(gone):
    print("gone:", gone, flush=True)
    told.set()
watch = NextWorker(on_gone)
dist.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    told.wait()
    watch.say_goodbye()
    store.set("left", "1")
else:
    store.get("left")
    watch.leave()
os._exit(0)
"""


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )


def test_neither_an_abort_nor_the_shutdown_that_block_keep_a_process_from_ending() -> None:
    process = run(BLOCKED)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert out.split("\n") == ["aborted", "shutting down", ""]
    assert process.returncode == 1
    assert err.endswith("ValueError: the reason\n")


def test_what_blocks_with_the_interpreters_lock_ends_as_well() -> None:
    process = run(LOCKED)
    assert process.communicate(timeout=TIMEOUT_S) == ("", "")
    assert process.returncode == 1


def test_a_worker_learns_that_the_next_one_was_killed_but_not_that_it_left(tmp_path: Path) -> None:
    workers = [run(RING, str(rank), str(tmp_path / "store")) for rank in range(3)]
    outputs = [worker.communicate(timeout=TIMEOUT_S) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, -signal.SIGKILL], outputs
    assert [out for out, _ in outputs] == ["", "gone: 2\n", ""]


def test_what_blocks_or_raises_is_left_behind() -> None:
    never = threading.Event()

    def fail() -> bool:
        raise ValueError

    assert within(0.1, never.wait, fail, lambda: True) == [True]
    assert within(TIMEOUT_S, fail, lambda: True) == [True]


def test_an_abort_forgets_the_groups() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    abort_groups()
    assert not dist.is_initialized()
    abort_groups()  # there are none


def test_an_exhausted_gpu_is_told_in_the_words_of_pytorch() -> None:
    asked = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"
    )
    told = memory_failure(asked)
    assert told is not None
    assert told.startswith("out of memory: ")
    assert "Tried to allocate 2.00 GiB" in told
    wrapped = ValueError("in a layer")
    wrapped.__cause__ = RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )
    assert "CUBLAS_STATUS_ALLOC_FAILED" in (memory_failure(wrapped) or "")


def test_an_exhausted_host_is_told_with_what_was_asked_for() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8)
    assert "1125899906842624 bytes" in (memory_failure(raised.value) or "")
    assert memory_failure(KeyError("memory")) is None


@pytest.mark.parametrize(
    ("given", "torchrun", "then"),
    [(None, False, "0"), ("1", True, "0"), ("1", False, "1"), ("3", True, "3")],
)
def test_nccls_watchdog_ends_no_worker_unless_the_user_says_so(
    given: str | None, torchrun: bool, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for other in (
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
    ):
        monkeypatch.setenv(other, "0")  # so that they are as before at the end
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    keep_failures_ours()
    assert os.environ[name] == then
