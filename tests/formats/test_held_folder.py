"""Folders that their process holds: removed at its end, or by who comes next, however it ended."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from planner.formats.held_folder import held_folder

HOLDS = """
import sys
from planner.formats.held_folder import held_folder

with held_folder("test") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    """Start a process that holds a folder, and return it with the folder."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_with_its_block(place: Path) -> None:
    with held_folder("test") as folder:
        assert folder.parent == place
    assert list(place.iterdir()) == []


def test_a_killed_process_leaves_a_folder_that_the_next_one_removes(place: Path) -> None:
    process, folder = holder()
    with held_folder("test"):
        assert (folder / "file").exists(), "a process holds it"

    process.kill()
    process.communicate()
    assert (folder / "file").exists(), "nobody has removed it"
    with held_folder("test") as own:
        assert list(place.iterdir()) == [own]


def test_what_only_looks_like_one_stays(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with held_folder("test") as folder:
        name = folder.name
    (place / f"{name}-link").symlink_to(elsewhere)
    (place / f"{name}-file").touch()
    with held_folder("test"):
        pass
    assert {path.name for path in place.iterdir()} == {f"{name}-link", f"{name}-file"}
    assert elsewhere.exists()


def test_a_folder_of_another_host_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may be known to that host alone."""
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    with held_folder("test") as folder:
        name = folder.name
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    (place / name).mkdir()
    with held_folder("test"):
        assert (place / name).exists()


@pytest.mark.timeout(20)
def test_a_file_system_without_locks_has_folders_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held_folder("first") as first, held_folder("second") as second:
        assert set(place.iterdir()) == {first, second}
    assert list(place.iterdir()) == []


@pytest.mark.timeout(20)
def test_a_process_without_descriptors_gets_an_error(place: Path) -> None:
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"), held_folder("test"):
            pass
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert list(place.iterdir()) == []
