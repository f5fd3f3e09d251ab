"""What is said of published runs: intervals, choices by data sheets, and what a source needs."""

from __future__ import annotations

import pytest

from benchmarks.gpu_truth import bigscience, primus
from benchmarks.gpu_truth.intervals import (
    LEAST_ROWS,
    Judged,
    interval,
    is_divided,
    is_replicated,
    promise,
    read,
    table_of,
)
from benchmarks.gpu_truth.rows import ANCHORS
from benchmarks.gpu_truth.slow_links import Way, choice, share_right_or_warned
from planner.plan.confidence import Network

needs_anchors = pytest.mark.skipif(not ANCHORS.is_dir(), reason="the measurements are not here")


def judged(source: str, network: Network, *speeds: float) -> list[Judged]:
    return [
        Judged(source, "mine", "known", network, False, True, measured_s=1.0, predicted_s=speed)
        for speed in speeds
    ]


def test_an_interval_is_the_shortest_with_four_fifths_of_the_rows_and_the_next() -> None:
    assert interval([0.5, 0.9, 1.0, 1.1, 1.2]) == (0.5, 1.2)  # 0.8 of 6 are all five
    assert interval([0.5, 0.9, 1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5]) == (0.9, 1.5)


def test_a_kind_holds_each_of_its_sets_and_wider_ones_hold_all() -> None:
    fast = judged("a", "fast", *(1.0 + 0.01 * number for number in range(LEAST_ROWS)))
    slow = judged("b", "slow", *(0.5 + 0.01 * number for number in range(LEAST_ROWS)))
    table = table_of([*fast, *slow])
    ends = {(kind["gpu"], kind["network"]): (kind["least"], kind["most"]) for kind in table}
    assert ends["mine", "fast"] == (1.0, 1.04)
    assert ends["mine", "slow"] == (0.5, 0.54)
    assert ends["mine", None] == ends["", None] == (0.5, 1.04)
    few = judged("c", "fast", 1.0)
    assert table_of(few) == []


@pytest.mark.parametrize(
    ("plan", "divided", "replicated"),
    [
        ("pp 1, dp 32, tp 2, microbatch 2", True, True),
        ("pp 10, dp 1, tp 8, microbatch 1, 96 heads", True, False),
        ("pp 64x1, tp 8, all layers recompute", True, False),
        ("2 stages x1,1, flash", False, False),
        ("2 stages x2,2, flash", False, True),
        ("13 stages, microbatch 1, tp 2,4", True, False),
    ],
)
def test_words_of_plans(plan: str, divided: bool, replicated: bool) -> None:
    assert is_divided(plan) == divided
    assert is_replicated(plan) == replicated


def test_most_sets_are_held() -> None:
    """Rows that the intervals were made of; those of the smallest sets speak with others."""
    rows = read()
    for source in {row.source for row in rows}:
        own = [row for row in rows if row.source == source]
        if len(own) >= LEAST_ROWS:
            held, _, _ = promise(own)
            assert held >= 0.74, source


def test_choices_that_flip_are_said_to() -> None:
    replicas = Way("job", "replicas", 1.7, lambda share: 1.0 / share)
    pipeline = Way("job", "pipeline", 1.0, lambda share: 1.1)
    both = choice([replicas, pipeline])
    assert (both.chosen, both.slow) == (replicas, pipeline)
    assert both.speedup == pytest.approx(5 / 1.1)
    assert both.regret == pytest.approx(0.7)
    assert both.is_warned
    assert not both.is_right

    same = choice([Way("job", "a", 1.0, lambda share: 1.0), Way("job", "b", 1.02, lambda _: 1.1)])
    assert same.is_right
    assert not same.is_warned
    wrong = choice([Way("job", "a", 2.0, lambda share: 1.0), Way("job", "b", 1.0, lambda _: 1.1)])
    assert share_right_or_warned([both, same, wrong]) == pytest.approx(2 / 3)


@needs_anchors
def test_stages_of_bigscience_wait_for_their_messages() -> None:
    """Two stages of two blocks, and an embedding and a head."""
    record = {**next(bigscience.records()), "layers_per_stage_inferred": "2 2"}
    profile = bigscience._profile(record, bigscience.SPEC)
    slow = bigscience.waiting(profile, [2, 2], message_s=1.0)
    waits = [
        new.forward_s - old.forward_s for new, old in zip(slow.layers, profile.layers, strict=True)
    ]
    assert waits == pytest.approx([0, 0, 1, 1, 0, 0])
    sent = bigscience.without_messages(slow).layers[0].outputs[0]
    assert sent.output_bytes == sent.gradient_bytes == 1


@needs_anchors
def test_ratios_of_schedules_on_mi300x() -> None:
    """Of all but V-Min, which waits for what no profile measures."""
    first, *others = (row.now() for row in primus.rows() if row.plan != "v-min")
    assert len(others) == 4
    assert first.error == pytest.approx(-0.2, abs=0.05)
    for row in others:
        assert row.predicted is not None
        assert first.predicted is not None
        predicted = first.predicted.seconds / row.predicted.seconds
        assert predicted == pytest.approx(first.measured_s / row.measured_s, rel=0.04)
