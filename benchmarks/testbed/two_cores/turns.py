"""Let contenders take turns on the same cores: all are started and warm, and all but one are
stopped.

A shared or virtual machine drifts: its cores are faster now and slower a minute later. So
contenders that are compared run in short windows, in the order A B C, C B A, A B C, ...; in each
such cycle all have the same mean time, and a drift cancels in the ratio of two of them. A contender
that waits is stopped by a signal (SIGSTOP), and goes on where it was, with whatever it had in
flight.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.kept import ROOT
from benchmarks.testbed.two_cores.launch import CORES, Place, RunError, free_port
from benchmarks.testbed.two_cores.marks import VARIABLE, rate, read_marks

WARM_UP_MARKS = 8  # steps before a contender's first window
START_S = 120.0  # at most, until then
_POLL_S = 0.02
_STORES = """
import sys, time
from torch.distributed import TCPStore
stores = [
    TCPStore(sys.argv[1], int(port), is_master=True, wait_for_workers=False)
    for port in sys.argv[2:]
]
print("open", flush=True)
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Contender:
    """One way to train, which goes on for ever.

    Attributes:
        name: in the tables.
        where: a place for each process.
        command: a module and its arguments.
        batch_size: samples per minibatch.
        predicted_samples_per_s: by its plan, if it has one.
    """

    name: str
    where: Sequence[Place]
    command: Sequence[str]
    batch_size: int
    predicted_samples_per_s: float | None = None


@dataclass(frozen=True)
class Window:
    """What a contender did in one turn."""

    contender: str
    cycle: int
    samples_per_s: float


class Running:
    """A contender's processes, pinned to a core each, stopped except in their turns.

    Args:
        contender: what to run.
        folder: for its files.
        port: of a store by which the processes meet.
    """

    def __init__(self, contender: Contender, folder: Path, port: int) -> None:
        self.contender = contender
        self._processes: list[subprocess.Popen[bytes]] = []
        world = len(contender.where)
        self._marks = [folder / f"{contender.name}.{rank}.marks" for rank in range(world)]
        self._errors = [folder / f"{contender.name}.{rank}.errors" for rank in range(world)]
        for rank, (place, core) in enumerate(zip(contender.where, CORES, strict=False)):
            self._marks[rank].unlink(missing_ok=True)
            # What torchrun sets. Its agents would take turns, too.
            variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": str(rank)}
            variables |= {
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            variables |= {"MASTER_ADDR": contender.where[0].address, "MASTER_PORT": str(port)}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            variables |= {VARIABLE: str(self._marks[rank])}
            with self._errors[rank].open("wb") as errors:
                process = subprocess.Popen(
                    place.command(
                        ["taskset", "-c", str(core), sys.executable, "-m", *contender.command]
                    ),
                    env=place.environment(variables),
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            self._processes.append(process)

    def __enter__(self) -> Running:
        """Wait until it is warm, and stop it.

        Raises:
            RunError: when it fails or does not get there.
        """
        deadline = time.monotonic() + START_S
        while self._steps(0.0) < WARM_UP_MARKS:
            self._check()
            if time.monotonic() > deadline:
                self._end()
                raise RunError(f"'{self.contender.name}' did not train within {START_S:.0f} s")
            time.sleep(0.1)
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self._end()

    def turn(self, seconds: float, cycle: int) -> Window:
        """Let it run for so long, or a little longer until every process that counts has made three
        steps.
        """
        began_s = time.monotonic()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        while self._steps(began_s) < 3:
            self._check()
            time.sleep(_POLL_S)
        self._signal(signal.SIGSTOP)
        # From the first step that ended in this turn, a part of which was in the last one.
        minibatches_per_s = sum(rate(read_marks(path, began_s)) for path in self._marks)
        return Window(
            self.contender.name,
            cycle,
            minibatches_per_s * self.contender.batch_size,
        )

    def _steps(self, since_s: float) -> int:
        """Count the steps of the process that marks them."""
        return max(len(read_marks(path, since_s)) for path in self._marks)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def _check(self) -> None:
        for process, errors in zip(self._processes, self._errors, strict=True):
            if process.poll() is not None:
                self._end()
                raise RunError(
                    f"'{self.contender.name}' ended with exit code {process.returncode}:\n"
                    + errors.read_text(errors="replace")[-4000:]
                )

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def _stores(place: Place, count: int) -> Iterator[list[int]]:
    """Open so many stores at `place`, as torchrun's agent does for its workers; yield their
    ports.
    """
    ports = [free_port() for _ in range(count)]
    process = subprocess.Popen(
        place.command([sys.executable, "-c", _STORES, place.address, *map(str, ports)]),
        env=place.environment(),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RunError("the store by which processes meet did not start")
        yield ports
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def take_turns(
    contenders: Sequence[Contender], folder: Path, until_s: float, window_s: float
) -> Iterator[Window]:
    """Yield the windows of whole cycles, at least two, that begin before `until_s` on
    `time.monotonic`'s clock.

    Raises:
        RunError: when a contender fails; none is left running.
    """
    with ExitStack() as stack:
        ports = stack.enter_context(_stores(contenders[0].where[0], len(contenders)))
        running = [
            stack.enter_context(Running(contender, folder, port))
            for contender, port in zip(contenders, ports, strict=True)
        ]
        cycle = 0
        while cycle < 2 or time.monotonic() < until_s:
            for each in (*running, *reversed(running)):
                yield each.turn(window_s, cycle)
            cycle += 1
