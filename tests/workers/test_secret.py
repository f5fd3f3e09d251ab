"""The secret of a run: where it comes from, and who may read it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.workers.secret import (
    FILE_VARIABLE,
    SECRET_VARIABLE,
    default_file,
    new_secret,
    run_secret,
    secret_in,
    secret_of_hosts,
)

SECRET = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_VARIABLE, FILE_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set here ends with the test
        monkeypatch.delenv(name)


def test_no_two_secrets_are_the_same_and_none_is_short() -> None:
    assert new_secret() != new_secret()
    assert len(new_secret()) == 64


def test_the_environment_gives_it_or_names_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_secret() is None
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "secret"))
    made = run_secret()
    assert made == secret_in(tmp_path / "secret").encode()
    assert os.environ[SECRET_VARIABLE].encode() == made  # for the processes that this one starts
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert run_secret() == SECRET.encode()
    assert secret_of_hosts(tmp_path / "other") == SECRET
    assert not (tmp_path / "other").exists()


def test_who_comes_first_makes_the_file_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secret"
    secrets = set[str]()
    threads = [threading.Thread(target=lambda: secrets.add(secret_in(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    secret = secret_in(path)
    path.chmod(mode)
    with pytest.raises(
        InputError, match=r"other users can read the secret in '.*'\nhint: chmod 600 "
    ):
        secret_in(path)
    path.chmod(0o600)
    assert secret_in(path) == secret


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret_in(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(InputError, match="belongs to another user, who knows the secret"):
        secret_in(path)


@pytest.mark.parametrize("text", ["", "short", "0123456789abcdef0123456789abcde"])
def test_what_can_be_guessed_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, text)
    with pytest.raises(
        InputError, match=rf"the secret in PLAN_SECRET has {len(text)} characters, which can be"
    ):
        run_secret()
    path = tmp_path / "secret"
    path.write_text(f"{text}\n", encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(InputError, match="openssl rand -hex 32"):
        secret_in(path)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(
        InputError, match=r"cannot be kept in .*\nhint: name another file with `secret_file`"
    ):
        secret_in(tmp_path / "file" / "secret")


def test_each_run_and_place_to_meet_has_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        default_file("run-3", "host0:29500") == tmp_path / ".planner" / "secret-run-3-host0:29500"
    )
    assert default_file("run-3", "a/../b:1").parent == tmp_path / ".planner"
