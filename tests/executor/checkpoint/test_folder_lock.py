"""Two runs never write checkpoints to one folder at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.executor.checkpoint.folder_lock import lock_folder

TIMEOUT_S = 120
LOCKING = """
import sys
from pathlib import Path
from planner.errors import InputError
from planner.executor.checkpoint.folder_lock import lock_folder

try:
    lock_folder(Path(sys.argv[1]), sys.argv[2])
except InputError as refusal:
    print(refusal.message)
else:
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path, run: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Lock in another process, until the block ends; yield it and the first line that it prints."""
    command = [sys.executable, "-c", LOCKING, str(folder), run]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with other_process(tmp_path, "first") as (holder, line):
        assert line == "locked"
        with pytest.raises(
            InputError, match=f"another run, process {holder.pid} on host"
        ) as refusal:
            lock_folder(tmp_path, "second")
        assert "another `checkpoint_folder`" in refusal.value.hint

    # The kernel gives back the lock of a process that was killed.
    lock_folder(tmp_path, "second")
    lock_folder(tmp_path, "second")  # as a run does that makes another checkpointer
    with other_process(tmp_path, "third") as (_, line):
        assert line.startswith("another run, process")


def test_other_folders_are_free(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with other_process(tmp_path / "one", "first") as (_, line):
        assert line == "locked"
        lock_folder(tmp_path / "other", "second")


def test_a_restart_waits_for_the_end_of_the_same_run(tmp_path: Path) -> None:
    with other_process(tmp_path, "run") as (holder, line):
        assert line == "locked"
        with other_process(tmp_path, "another run") as (_, refused):
            assert refused.startswith(f"another run, process {holder.pid}")
        waiting = subprocess.Popen(
            [sys.executable, "-c", LOCKING, str(tmp_path), "run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(3)
            holder.kill()
            assert waiting.stdout is not None
            assert waiting.stdout.readline().strip() == "locked"
        finally:
            waiting.kill()
            waiting.communicate(timeout=TIMEOUT_S)
