"""The process beside a run that solves again for what the run measured.

It answers one question and ends. A run that may move to another plan has the next one ready: its
imports take seconds on full cores.
"""

import subprocess
import sys
import threading
from pathlib import Path

from planner.errors import PlannerError

_MODULE = "planner.api.corrected"


class SolverProcess:
    """Asks one process after the other, each of which reads the profile of the run.

    Args:
        profile: the file that the plan was solved from.
        ready: whether a process waits for each question, the first included.
    """

    def __init__(self, profile: str, *, ready: bool) -> None:
        self._profile = profile
        self._ready = ready
        self._lock = threading.Lock()  # of the next three
        self._ended = False
        self._asking = False
        self._process = self._started() if ready else None

    def answer(self, folder: Path) -> None:
        """Let the question in a folder be answered there; raise PlannerError without an answer."""
        with self._lock:
            if self._ended:
                raise PlannerError("the run ended before")
            if self._process is None:
                self._process = self._started()
            self._asking = True
            process = self._process

        _, errors = process.communicate(f"{folder}\n".encode())

        with self._lock:
            self._asking = False
            self._process = None
            if self._ready and not self._ended:
                self._process = self._started()

        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise PlannerError(last or "the search was ended")

    def end(self) -> None:
        """End the process, and with it the search for an answer; there are no more questions."""
        with self._lock:
            self._ended = True
            if self._process is None:
                return
            self._process.kill()
            if not self._asking:
                self._process.communicate()  # waits for it, and closes its pipes

    def _started(self) -> subprocess.Popen[bytes]:
        # It ends with the run, however that ends: its input does.
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, self._profile],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
