"""Where threads are in their code: read without keeping anything of theirs alive."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from planner.workers.stacks import stacks_of_others

TIMEOUT_S = 60.0


class Waiting:
    """A thread that waits in a function of a file of its own."""

    def __init__(self, path: Path) -> None:
        source = "def outer(wait):\n    return inner(wait)\n\ndef inner(wait):\n    wait()\n"
        path.write_text(source, encoding="utf-8")
        names: dict[str, object] = {}
        exec(compile(source, str(path), "exec"), names)
        self._goes_on = threading.Event()
        self._is_there = threading.Event()
        self.thread = threading.Thread(
            target=names["outer"],  # type: ignore[arg-type]
            args=(self._wait,),
        )
        self.thread.start()
        assert self._is_there.wait(TIMEOUT_S)

    def _wait(self) -> None:
        self._is_there.set()
        assert self._goes_on.wait(TIMEOUT_S)

    def end(self) -> None:
        self._goes_on.set()
        self.thread.join(TIMEOUT_S)


@pytest.mark.parametrize("name", ["model.py", "modèle 模型.py"])
def test_the_stack_of_a_thread_is_its_files_lines_and_functions(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    waiting = Waiting(path)
    try:
        stacks = stacks_of_others()
    finally:
        waiting.end()
    (own,) = (
        [frame for frame in stack if frame[0] == str(path)]
        for stack in stacks
        if str(path) in str(stack)
    )
    assert own == [(str(path), 2, "outer"), (str(path), 5, "inner")]


def test_the_main_threads_stack_comes_first_and_the_readers_is_left_out(tmp_path: Path) -> None:
    stacks: list[list[tuple[str, int, str]]] = []
    waiting = Waiting(tmp_path / "other.py")
    reader = threading.Thread(target=lambda: stacks.extend(stacks_of_others()), name="reader")
    try:
        reader.start()
        reader.join(TIMEOUT_S)
    finally:
        waiting.end()
    assert __file__ in {file for file, _, _ in stacks[0]}
    assert "stacks_of_others" not in {function for stack in stacks for _, _, function in stack}


class Held:
    """What a function of the main thread has in a variable, as a tracer has tensors."""


def run() -> weakref.ref[Held]:
    held = Held()
    return weakref.ref(held)


def test_nothing_of_the_threads_that_are_read_outlives_its_function() -> None:
    """An object of a frame would keep the variables for as long as the reader has it."""
    done = threading.Event()
    reads: list[int] = []

    def read() -> None:
        while not done.is_set():
            reads.append(len(stacks_of_others()))

    reader = threading.Thread(target=read)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that it often reads in the middle of `run`
    reader.start()
    try:
        deadline = time.monotonic() + TIMEOUT_S
        outlived = 0
        while len(reads) < 1000 and time.monotonic() < deadline:
            outlived += run()() is not None
    finally:
        done.set()
        reader.join(TIMEOUT_S)
        sys.setswitchinterval(before)
    assert len(reads) >= 1000
    assert outlived == 0
