"""Folders for temporary files that are removed even where the process that made them is killed.

Whoever makes one holds a lock on it for as long as it lives: the kernel gives the lock back when
the process ends, however it ends. Whoever makes the next one removes those that no process holds;
how old they are says nothing.

Hosts may share the place for temporary files, and a file system between them may keep the locks of
each host to itself. So a folder has the name of its host, and is removed there alone.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

# Rare enough that no other program's folder begins with it.
_PREFIX = "plan-held-"


@contextmanager
def held_folder(purpose: str, place: Path | None = None) -> Iterator[Path]:
    """Make a folder of its own for the block, and remove it in the end.

    Args:
        purpose: part of its name.
        place: the folder that it is made in; None for that of temporary files.

    Raises:
        OSError: where no folder for temporary files takes one.
    """
    place = place or Path(tempfile.gettempdir())
    remove_abandoned(place)
    folder, lock = _make(purpose, place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


class _NoLocksError(OSError):
    """The file system has no locks, or has none left."""


def _prefix() -> str:
    return f"{_PREFIX}{socket.gethostname()}-"


def _make(purpose: str, place: Path) -> tuple[Path, int | None]:
    """Return a new folder and the descriptor that locks it; None where there are no locks, and so
    nobody removes it.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{purpose}-", dir=place))
        try:
            lock = _locked(folder)
        except _NoLocksError:
            return folder, None
        except OSError:
            folder.rmdir()
            raise

        # Before it was locked, another start may have taken it for one that nobody holds.
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)


def remove_abandoned(place: Path) -> None:
    """Remove the folders of this user in a place that no process holds."""
    for folder in place.glob(f"{escape(_prefix())}*"):
        with suppress(OSError):  # another start removes it, or it cannot be locked
            status = folder.lstat()
            if status.st_uid != os.geteuid() or folder.is_symlink():
                continue
            lock = _locked(folder)
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder; return the descriptor that holds the lock, or None where another process holds
    or removed it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # removed meanwhile
        return None

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise _NoLocksError(error.errno, error.strerror) from None

    return descriptor
