"""Folders for temporary files that are removed even where the process that made them is killed.

Whoever makes one holds a lock on it for as long as it lives: the kernel gives the lock back when the process ends,
however it ends. Whoever makes the next one removes those that no process holds; how old they are says nothing.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Rare enough that no other program's folder begins with it.
_PREFIX = "plan-held-"


@contextmanager
def held_folder(purpose: str) -> Iterator[Path]:
    """Make a folder of its own for the block, and remove it in the end.

    Raises:
        OSError: where no folder for temporary files takes one.
    """
    _remove_abandoned()
    folder, lock = _make(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(purpose: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
        lock = _locked(folder)
        # Before it was locked, another start may have taken it for one that nobody holds.
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)


def _remove_abandoned() -> None:
    """Remove the folders of this user that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another start removes it
            status = folder.lstat()
            if status.st_uid != os.geteuid() or folder.is_symlink():
                continue
            lock = _locked(folder)
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder; return the descriptor that holds the lock, or None where another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
