"""What ranks are told when their calls or batches differ; real ranks do in `test_own_loops`."""

from __future__ import annotations

import pytest

from planner.executor.run.calls import (
    Call,
    Row,
    _ended_early,
    _other_calls,
    _other_minibatch,
    ranks_in_words,
)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([1, 3], "ranks 1 and 3"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        (range(1, 64), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 others"),
    ],
)
def test_ranks_are_named(ranks: list[int], words: str) -> None:
    assert ranks_in_words(list(ranks)) == words


def test_each_group_of_ranks_that_differs_is_in_the_sentence() -> None:
    step = Row(Call.STEP, 12, 8, 77)
    others = Row(Call.STEP, 12, 8, 78)
    assert _other_minibatch([step, others, step, Row(Call.STEP, 12, 8, 79)]).message == (
        "minibatch 12 is not the same on all ranks: ranks 1 and 3 got other samples than rank 0, "
        "or in another order"
    )
    assert _other_minibatch([step, step, Row(Call.STEP, 12, 4, 77)]).message == (
        "minibatch 12 is not the same on all ranks: it has 4 samples on rank 2, and 8 on rank 0"
    )


def test_a_loop_that_ended_is_told_with_what_the_others_do() -> None:
    step, end = Row(Call.STEP, 12, 8, 77), Row(Call.END, 12)
    assert _ended_early([step, end, end]).message == (
        "ranks 1 and 2 ended the loop after 12 minibatches, and on rank 0 another minibatch comes: "
        "loaders of different length"
    )
    assert _ended_early([Row(Call.END, 1), Row(Call.EVALUATE, 1, 4)]).message == (
        "rank 0 ended the loop after 1 minibatch, and on rank 1 evaluate() is called"
    )


def test_calls_that_differ_are_told_with_the_minibatches_before() -> None:
    rows = [Row(Call.STEP, 12, 8, 77), Row(Call.STEP, 12, 8, 78), Row(Call.SAVE_WEIGHTS, 12)]
    assert _other_calls(rows).message == (
        "the calls of the pipeline differ: save_weights() after 12 minibatches on rank 2, "
        "and step() after 12 minibatches on rank 0"
    )
    rows = [Row(Call.STEP, 12, 8, 77), Row(Call.STEP, 8, 8, 77)]  # they loaded other checkpoints
    assert "step() after 8 minibatches on rank 1, and step() after 12" in _other_calls(rows).message
