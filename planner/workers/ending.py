"""End a worker after a failure: leave the reason first, then abort the process groups, and wait for
nothing.

Under NCCL most ways to end may wait for a peer that is gone. So everything after the reason is
bounded.
"""

import atexit
import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from planner.workers.job import LAUNCHER_VARIABLE
from planner.workers.meeting import hold_store

# How long a worker that lost its peer waits before it ends: the launcher ends all workers as soon
# as one has ended, and the peer, whose failure is the cause, must have reported it by then.
GRACE_S = 3.0
ABORT_S = 3.0  # how long an abort may take
EXIT_S = 5.0  # how long the interpreter may take to shut down after a failure
END_S = 20.0  # how long a failed worker may take in all, with each of its steps bounded
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Each process group of NCCL reads these when it is made. By default its watchdog ends the process
# with SIGABRT when a peer is lost: that would hide the first cause behind another message, or a
# core dump.
_NCCL_VARIABLES = {
    # An abort by the watchdog (1, 2) would let the kernels that wait go on with what the buffers
    # hold.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the main thread meets the same error, and knows where
    # or a second thread ends the process when the watchdog itself blocks
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

T = TypeVar("T")


def keep_failures_ours() -> None:
    """Let NCCL's own threads end no worker, unless the environment says otherwise; call it before
    any group is made.
    """
    # torchrun's agent sets this one to 1 where nobody set it, so 1 is no wish of the user's there.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(name) == "1":
        del os.environ[name]
    for name, value in _NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)


def within(seconds: float, *actions: Callable[[], T]) -> list[T]:
    """Call all `actions` at once, in threads; return the results of those that end in time and do
    not raise.

    Where the system gives no more threads, they are called here, one after the other, for as long
    as each takes: a worker that fails has set an end for the process before.
    """
    results: list[T] = []

    def run(action: Callable[[], T]) -> None:
        with suppress(Exception):
            results.append(action())

    threads = []
    for action in actions:
        thread = threading.Thread(target=run, args=(action,), name="bounded", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # "can't start new thread"
            run(action)
        else:
            threads.append(thread)

    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)


def abort_groups() -> None:
    """Abort all process groups, within `ABORT_S`; `destroy_process_group` would wait for what is on
    the device.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    groups = list(distributed_c10d._world.pg_map)
    # At the same time: to abort a communicator is to wait for its kernel, which may wait behind
    # another one's.
    if len(within(ABORT_S, *(group.abort for group in groups))) == len(groups):
        within(ABORT_S, distributed_c10d._abort_process_group)  # forgets them


def end_within(seconds: float) -> None:
    """End the process with exit code 1 after so many seconds, if it has not ended by then.

    By a thread in C, which needs no lock of the interpreter: a destructor that blocks may hold it.
    Where the system gives no more threads, by SIGALRM, which needs none.
    """
    nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
    except RuntimeError:  # "unable to start watchdog thread"
        signal.alarm(math.ceil(seconds))


def bound_exit() -> None:
    """End the process with exit code 1 when the interpreter, once it begins to, takes too long to
    shut down.
    """
    atexit.register(end_within, EXIT_S)


def end_process(code: int) -> NoReturn:
    """End at once: torch's teardown at interpreter exit now and then never ends when gloo
    was used.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        hold_store(GRACE_S)
    os._exit(code)


def die_with_parent() -> None:
    """End this process when the launcher dies, even by SIGKILL: no worker is left running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)  # it died before we asked to be told
