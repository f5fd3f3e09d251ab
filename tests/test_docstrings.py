"""The examples in the docstrings of public functions run, and print what they say."""

import doctest
import inspect
import shutil
from pathlib import Path

import pytest

import planner

ROOT = Path(__file__).parents[1]
SMALL_MODEL = ROOT / "tests" / "docs" / "small_model.py"
FUNCTIONS = [name for name in planner.__all__ if inspect.isfunction(getattr(planner, name))]


def _examples(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(planner, name)) or "")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if _examples(name)])
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(SMALL_MODEL, tmp_path / "model.py")
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTest(_examples(name), {"planner": planner}, name, None, 0, None)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        test, out=said.append
    )
    assert not result.failed, "".join(said)


def test_verbs_have_examples() -> None:
    verbs = {
        "profile",
        "estimate",
        "solve",
        "price",
        "compare",
        "explain",
        "simulate",
        "train",
        "export",
    }
    assert verbs <= {name for name in FUNCTIONS if _examples(name)}
