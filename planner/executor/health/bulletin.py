"""What workers on several hosts tell each other about failures, in torchrun's store."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.executor.job import Failure

_CONNECT = timedelta(seconds=60)


class Bulletin:
    """Failures that workers report to each other, in torchrun's store."""

    def __init__(self) -> None:
        self.place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_CONNECT,
        )
        self.store = PrefixStore(f"plan/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def post(self, failure: Failure) -> None:
        """Report why a worker ends. The first report that is no consequence of others is the cause for all."""
        text = failure.model_copy(update={"traceback": ""}).model_dump_json()
        self.store.set(f"failure/{failure.rank}", text)
        if not failure.consequence:
            self._first("cause", failure.rank)

    def cause(self) -> Failure | None:
        """Return the failure that the run ends with, if one was reported."""
        if not self.store.check(["cause"]):
            return None
        return Failure.model_validate_json(self.store.get(f"failure/{int(self.store.get('cause'))}"))

    def first_gone(self, rank: int) -> int:
        """Record that the process of `rank` is gone, and return the first of which that was recorded.

        When a worker dies, torchrun ends the other workers of its host, and their connections break as well.
        """
        return self._first("gone", rank)

    def is_first_here(self) -> bool:
        """Return whether this worker is the first of its host to ask, so that each host reports an error once."""
        asked: int = self.store.add(f"told/{os.environ.get('GROUP_RANK', '0')}", 1)
        return asked == 1

    def _first(self, key: str, rank: int) -> int:
        # Sets the key only where it is missing, and returns what it holds then.
        return int(self.store.compare_set(key, "", str(rank)))
