"""Only workers of the run get what its launcher holds in memory."""

from __future__ import annotations

from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from planner.workers.handing import SOCKET, handing_over, take_over

SECRET = "0123456789abcdef" * 2


def test_every_worker_gets_it(tmp_path: Path) -> None:
    content = b"weights" * 100_000
    with handing_over(content, tmp_path, SECRET):
        assert take_over(tmp_path, SECRET.encode()) == content
        assert take_over(tmp_path, SECRET.encode()) == content
    assert not (tmp_path / SOCKET).exists()


def test_a_stranger_gets_nothing_and_ends_nothing(tmp_path: Path) -> None:
    with handing_over(b"weights", tmp_path, SECRET):
        with pytest.raises(AuthenticationError):
            take_over(tmp_path, b"another secret")
        assert take_over(tmp_path, SECRET.encode()) == b"weights"


def test_without_a_model_nothing_listens(tmp_path: Path) -> None:
    with handing_over(None, tmp_path, SECRET):
        assert not (tmp_path / SOCKET).exists()
