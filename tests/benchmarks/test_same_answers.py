"""The comparison of answers before and after a change."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.same_answers.answers import differences, main
from benchmarks.same_answers.questions import without_times


def test_differences_name_the_place() -> None:
    before = {"a": 1, "b": [1, {"c": 2}], "gone": 0}
    now = {"a": 1, "b": [1, {"c": 3}], "new": 0}
    assert list(differences(before, now)) == [
        ".b[1].c was 2, is 3",
        ".gone only before",
        ".new only now",
    ]
    assert not list(differences(before, before))


def test_what_differs_between_two_runs_is_left_out() -> None:
    assert without_times({"seconds": 1.5, "solver": [{"provenance": {}, "status": "optimal"}]}) == {
        "solver": [{"status": "optimal"}]
    }


def test_an_answer_equals_itself_and_a_changed_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "answers.gz"
    arguments = [str(saved), "--only", "alexnet/flat4", "--processes", "1"]
    assert main([*arguments, "--save"]) == 0
    assert main(arguments) == 0
    assert "1 of 1 answers are equal" in capsys.readouterr().out
    answers = json.loads(gzip.decompress(saved.read_bytes()))
    answers["plan/alexnet/flat4/never"]["plan"]["config"] = "4"
    saved.write_bytes(gzip.compress(json.dumps(answers).encode()))
    assert main(arguments) == 1
    assert "plan/alexnet/flat4/never: .plan.config was 4, is" in capsys.readouterr().out
