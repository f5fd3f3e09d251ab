"""One run at a time writes checkpoints to a folder: worker 0 holds a lock on a file in it for as
long as it lives, or until it writes to another folder.

The kernel gives the lock back when the process ends, however it ends, so none is ever left behind.
Linux keeps such locks on NFS (version 4) on the server, for all hosts.
"""

import errno
import fcntl
import json
import logging
import os
import time
from pathlib import Path

from planner.errors import InputError

LOCK = ".lock"
# For the run's own worker 0 of before a restart, which may take a moment to end.
RESTART_S = 60.0
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_log = logging.getLogger(__name__)
_descriptors: dict[Path, int] = {}  # of the locks that this process holds, by folder


def lock_folder(folder: Path, run: str) -> None:
    """Lock an existing folder for this process, until it ends or unlocks it; do nothing where the
    process has it already.

    Args:
        folder: of checkpoints.
        run: identifies the run. A start that follows another of the same run waits for that to end.

    Raises:
        InputError: when another run holds the lock.
        OSError: when the file cannot be written.
    """
    key = folder.resolve()
    if key in _descriptors:
        return

    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _acquire(descriptor, folder, run)
    except BaseException:
        os.close(descriptor)
        raise

    os.ftruncate(descriptor, 0)
    holder = {"run": run, "process": os.getpid(), "host": os.uname().nodename}
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    _descriptors[key] = descriptor


def unlock_folder(folder: Path) -> None:
    """Give back the lock on a folder; do nothing where this process has none."""
    descriptor = _descriptors.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, run: str) -> None:
    deadline_s = time.monotonic() + RESTART_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as cause:
            if cause.errno not in _UNSUPPORTED:
                raise
            text = (
                "'%s' is on a file system without locks: no second run may write checkpoints "
                "to it meanwhile"
            )
            _log.warning(text, folder)
            return

        holder = _holder(descriptor)
        if holder.get("run") != run or time.monotonic() >= deadline_s:
            raise InputError(
                f"another run, process {holder.get('process', '?')} on host "
                f"'{holder.get('host', '?')}', writes "
                f"checkpoints to '{folder}'",
                hint="choose another `checkpoint_folder`, or end that run first",
            )
        time.sleep(0.2)


def _holder(descriptor: int) -> dict[str, object]:
    """Return what the process that holds the lock wrote of itself; nothing where it has only just
    taken it.
    """
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    if isinstance(content, dict):
        return content
    return {}
