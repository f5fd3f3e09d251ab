"""See from outside what the workers of a launcher do: who they are, and what they were last heard of."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported by a star import

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
    """Connect to the store that a worker writes to; raise OSError or RuntimeError when it is gone."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    port = next(int(text.partition("=")[2]) for text in variables if text.startswith("MASTER_PORT="))
    return own_keys(TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)))


def minibatch_of(store: Store, rank: int) -> int | None:
    """Return the minibatch that a worker was last heard of in its schedule; None before that."""
    beat = last_beat(store, rank)
    found = re.search(r"minibatch (\d+)", beat.doing) if beat is not None and beat.stage is not None else None
    return None if found is None else int(found[1])
