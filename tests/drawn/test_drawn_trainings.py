"""Whatever a model file does: it trains as one plain process would, or it is refused with a
sentence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drawn.model_files import AXES, DrawnFile, draw_file
from tests.drawn.trainings import Outcome, outcome_of

FIRST = 5  # seeds that every run trains
PER_TEST, ALL = 20, 200
EQUAL_SHARE = 0.4  # of the trainings, at least: a refusal is an answer, but not to everything


def wrong(drawn: DrawnFile, outcome: Outcome) -> str | None:
    """Say what is wrong with an outcome; None where nothing is."""
    right = outcome.kind == "equal" or (outcome.kind == "refused" and drawn.refusable)
    if right:
        return None
    return f"seed {drawn.seed} ({drawn.title}; {outcome.shape}) {outcome.kind}: {outcome.detail}"


@pytest.mark.parametrize("seed", range(FIRST))
def test_a_drawn_file_trains_as_one_process_or_is_refused(seed: int, tmp_path: Path) -> None:
    drawn = draw_file(seed)
    assert wrong(drawn, outcome_of(drawn, tmp_path)) is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(FIRST, FIRST + ALL, PER_TEST))
def test_many_drawn_files_train_as_one_process_or_are_refused(first: int, tmp_path: Path) -> None:
    mistakes: list[str | None] = []
    equal = 0
    for seed in range(first, first + PER_TEST):
        folder = tmp_path / str(seed)
        folder.mkdir()
        drawn = draw_file(seed)
        outcome = outcome_of(drawn, folder)
        mistakes.append(wrong(drawn, outcome))
        equal += outcome.kind == "equal"

    assert not [mistake for mistake in mistakes if mistake is not None]
    assert equal >= EQUAL_SHARE * PER_TEST


def test_a_seed_draws_the_same_file_again() -> None:
    assert draw_file(17).text == draw_file(17).text


def test_every_choice_is_drawn() -> None:
    drawn = [draw_file(seed) for seed in range(FIRST + ALL)]
    for axis, choices in AXES.items():
        assert {each.names[axis] for each in drawn} == set(choices)
