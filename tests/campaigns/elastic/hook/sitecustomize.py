"""Let faults happen to a worker of the benchmark where its start-up or its training is in a phase
that was wished for.

Python imports this file at the begin of every process that has its folder in PYTHONPATH. The file
`wish-HOST-RANK` in the worker's folder names the phase, what happens, and how many seconds after
the phase began. The file `struck` says that it has happened, and in which phase the worker was
then. The environment says when it had imported what it needs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRUCK = Path("struck")
IMPORTS, IMPORTED = "imports", "ELASTIC_IMPORTED_S"
_STARTING = {
    "meeting the other hosts": "meeting",
    "looking for copies": "state",
    "fetching the state": "state",
    "meeting the other workers": "joining",
    "joining the other workers": "joining",
    "building": "building",
    "waiting for the others to build": "building",
    "looking for checkpoints": "restoring",
    "reading the checkpoint": "restoring",
    "waiting for the others to be ready": "connecting",
    "connecting": "connecting",
    "waiting for the others to start": "connecting",
}
START = (IMPORTS, *dict.fromkeys(_STARTING.values()))  # phases of a start, in their order
_ACTIVITIES = {**_STARTING, "evaluat": "evaluation", "checkpoint": "checkpoint", "aside": "copy"}
_INSTRUCTIONS = {"Forward": "forward", "AllReduce": "all-reduce", "Update": "update"}


def phase_of(what: object, evaluating: bool) -> str:
    """Return what a worker does, by the instruction or the activity that its heartbeat is told."""
    if isinstance(what, str):
        return next((phase for words, phase in _ACTIVITIES.items() if words in what), "other")
    name = type(what).__name__
    phase = "backward" if name.startswith("Backward") else _INSTRUCTIONS.get(name, "message")
    return "evaluation" if evaluating else phase


class _Listener:
    """Hears from the heartbeat of this process what it does."""

    def __init__(self, wish: Path) -> None:
        self._wish, self._phase = wish, IMPORTS
        self._look()

    def wrap(self, told: Callable[..., None]) -> Callable[..., None]:
        def tell(heartbeat: Any, what: Any, **flags: bool) -> None:
            told(heartbeat, what, **flags)
            os.environ.setdefault(IMPORTED, str(time.time()))
            self._phase = phase_of(what, flags.get("evaluating", False))
            self._look()

        return tell

    def _look(self) -> None:
        if not self._wish.exists():
            return
        phase, act, delay_s = self._wish.read_text(encoding="utf-8").split()
        if phase != self._phase:
            return
        self._wish.unlink()
        if float(delay_s):
            timer = threading.Timer(float(delay_s), self._strike, (act,))
            timer.daemon = True
            timer.start()
        else:
            self._strike(act)

    def _strike(self, act: str) -> None:
        hidden = STRUCK.with_name(".struck")
        hidden.write_text(self._phase, encoding="utf-8")
        hidden.rename(STRUCK)
        if act != "hold":
            os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)
        while STRUCK.exists():  # until the benchmark has taken the host or its link
            time.sleep(0.001)


if "ELASTIC_HOST" in os.environ and "RANK" in os.environ:
    _listener = _Listener(Path(f"wish-{os.environ['ELASTIC_HOST']}-{os.environ['LOCAL_RANK']}"))
    from planner.workers.heartbeat import Heartbeat

    Heartbeat.begin = _listener.wrap(Heartbeat.begin)  # type: ignore[method-assign]
    Heartbeat.enter = _listener.wrap(Heartbeat.enter)  # type: ignore[method-assign]
