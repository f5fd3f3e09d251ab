"""See from outside what the workers of a launcher do: who they are, and what they were last heard
of.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

# PyTorch exports both by a star import.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from planner.workers.secret import SECRET_VARIABLE
from planner.workers.watch import last_beat, own_keys


def workers_of(launcher: int) -> dict[int, int]:
    """Return the process ids of a launcher's workers by rank."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(text[5:]): pid for text in variables if text.startswith(b"RANK=")}
    return found


def store_of(worker: int) -> Store:
    """Connect to the store that a worker writes to, with its secret; raise OSError or RuntimeError
    when it is gone.
    """
    texts = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    variables = {name: value for name, _, value in (text.partition("=") for text in texts)}
    port = int(variables["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    with patch.dict(os.environ, {SECRET_VARIABLE: variables[SECRET_VARIABLE]}):
        return own_keys(store)


def minibatch_of(store: Store, rank: int) -> int | None:
    """Return the minibatch that a worker was last heard of in its schedule; None before that."""
    beat = last_beat(store, rank)
    found = (
        re.search(r"minibatch (\d+)", beat.doing)
        if beat is not None and beat.stage is not None
        else None
    )
    return None if found is None else int(found[1])
