"""200 changed plans and checkpoints: refused with a sentence, or the same bits as without the
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.mutated.changed_runs import Right, make_right, problem_with_checkpoint, problem_with_plan

FEW, ALL, PER_TEST = 2, 100, 25
_Check = Callable[[int, Right, Path], str | None]
KINDS = {"plan": problem_with_plan, "checkpoint": problem_with_checkpoint}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Right:
    """A run that was not changed."""
    return make_right(tmp_path_factory.mktemp("right"))


def problems(check: _Check, seeds: Iterable[int], right: Right, folder: Path) -> list[str]:
    found = (check(seed, right, folder / str(seed)) for seed in seeds)
    return [problem for problem in found if problem is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_run_is_refused_or_the_same(kind: str, right: Right, tmp_path: Path) -> None:
    assert problems(KINDS[kind], range(FEW), right, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(FEW, FEW + ALL, PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_runs_are_refused_or_the_same(
    kind: str, first: int, right: Right, tmp_path: Path
) -> None:
    assert problems(KINDS[kind], range(first, first + PER_TEST), right, tmp_path) == []
