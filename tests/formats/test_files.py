"""Files are validated when read and complete when written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from planner.errors import PlannerError, ProfileError
from planner.formats.files import (
    Record,
    check_writable,
    load_record,
    replacing,
    save_record,
    write_text,
)


class Small(Record):
    """A record for these tests."""

    schema_version: int = 1
    seconds: float
    names: tuple[str, ...] = ()


def load(path: Path) -> Small:
    return load_record(Small, path, ProfileError, "make another")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    record = Small(seconds=0.1 + 0.2, names=("a", "b"))
    save_record(record, tmp_path / "new" / "folder" / "small.json")
    assert load(tmp_path / "new" / "folder" / "small.json") == record


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema_version": 1}', "field 'seconds' is missing"),
        ('{"schema_version": 1, "seconds": 1, "extra": 2}', "extra = 2: unknown field"),
        ('{"schema_version": 1, "seconds": NaN}', "seconds = nan"),
        ('{"schema_version": 1, "seconds": Infinity}', "seconds = inf"),
        ('{"schema_version": 1, "seconds": "fast"}', "seconds = 'fast'"),
        ('{"schema_version": 1, "seconds": 1, "names": [1]}', "names[0] = 1"),
        ('{"schema_version": 9, "seconds": 1}', "schema_version 9, this version reads 1"),
        ('{"seconds": 1}', "schema_version None"),
        ('{"schema_version": 1, "seconds":', "is not JSON"),
        ("[1]", "holds a list"),
        ("", "is not JSON"),
    ],
)
def test_a_bad_file_is_named_with_the_field_and_the_value(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "small.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert complaint in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint == "make another"


def test_missing_files_folders_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="there is no file"):
        load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is not JSON"):
        load(tmp_path / "binary")


def test_writing_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_place_that_cannot_be_written_is_an_error_and_keeps_what_was_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlannerError, match="cannot be written"):
        write_text(tmp_path / "folder", "text")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(PlannerError, match="cannot be written"):
        write_text(tmp_path / "file" / "below", "text")
    for place in (tmp_path / "folder", tmp_path / "file" / "below", Path("/dev/fd/none/below")):
        with pytest.raises(PlannerError, match="cannot be written"):
            check_writable(place)
    for place in (tmp_path / "file", tmp_path / "new" / "file"):
        check_writable(place)
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("failure", [OSError("no space"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, failure: BaseException
) -> None:
    path = tmp_path / "new folder" / "file"
    with replacing(path) as temporary:
        temporary.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of")
            assert temporary.parent == path.parent
            raise failure

    with pytest.raises(type(failure)):
        fail()
    assert path.read_text() == "old"
    assert [each.name for each in path.parent.iterdir()] == ["file"]
