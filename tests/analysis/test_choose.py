"""Schedules and microbatch sizes side by side."""

from __future__ import annotations

import pytest

from planner.analysis.choose import COMPARED, choose
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.answers import choice_report
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.solver import solve
from tests.samples import layer, profile


def deep(size: int = 4, fixed_s: float = 0.0, graph_hash: str | None = "0123") -> Profile:
    """Sixteen layers whose times and activations grow with the batch, beside a fixed part per operation."""
    made = profile(
        *(
            layer(
                f"l{i}",
                fixed_s + size / 4,
                2 * (fixed_s + size / 4),
                output_bytes=size,
                weight_bytes=100,
                saved_bytes=25 * size,
            )
            for i in range(16)
        )
    )
    return made.model_copy(update={"microbatch_size": size, "graph_hash": graph_hash})


def test_the_fastest_is_chosen_and_all_are_shown() -> None:
    model, cluster = deep(), flat_cluster(4, 1e3)
    choice = choose([model], cluster)
    assert [option.schedule for option in choice.options] == list(COMPARED)
    assert choice.best.seconds_per_sample == min(option.seconds_per_sample for option in choice.options)
    for option in choice.options:
        count = 1 if option.schedule is ONE_F_ONE_B else 16
        alone = solve(model, cluster, schedule=option.schedule, microbatches=count)
        assert option.plan is not None
        assert option.plan.predicted == alone.predicted
        assert option.seconds_per_sample == pytest.approx(alone.predicted.seconds_per_minibatch / (4 * count))
        assert 0 <= option.idle_share < 1
    assert "chosen" in choice_report(choice)


def test_idle_time_is_the_bubble_where_all_else_is_even() -> None:
    """Free links, equal layers, four stages: (K - 1) / (m + K - 1), and half of that bubble with two chunks."""
    model = profile(*(layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=10**6, update_s=0) for i in range(8)))
    choice = choose([model], flat_cluster(4, 1e4), SolveOptions(microbatches=8))
    idle = {option.schedule.name: option.idle_share for option in choice.options}
    assert idle["gpipe"] == pytest.approx(3 / 11, abs=1e-3)
    assert idle["1f1b-flush"] == pytest.approx(3 / 11, abs=1e-3)
    assert idle["interleaved"] == pytest.approx(3 / 19, abs=1e-3)
    assert idle["1f1b"] == pytest.approx(0, abs=0.02)


def test_memory_decides_and_the_table_says_what_does_not_fit() -> None:
    model = deep()
    # Neither all sixteen microbatches fit, nor two versions of the weights.
    choice = choose([model], flat_cluster(4, 1e3, 2600), SolveOptions(recompute="never"))
    assert choice.plan.schedule.name in ("1f1b-flush", "zb-h1", "zb-v")
    assert "does not fit the memory" in choice_report(choice)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        choose([model], flat_cluster(4, 1e3, 300))


def test_one_gpu_has_nothing_to_interleave() -> None:
    choice = choose([deep()], flat_cluster(1, 1e3))
    assert choice.options[-1].schedule.name == "interleaved"
    assert choice.options[-1].plan is None
    assert "not possible: see it alone" in choice_report(choice)


def test_larger_microbatches_win_until_memory_ends() -> None:
    """A fixed part per operation favours large microbatches, memory small ones, at the same minibatch of 64."""
    sizes = [deep(size, fixed_s=0.5) for size in (16, 4, 8)]
    roomy = choose(sizes, flat_cluster(4, 1e4), SolveOptions(microbatches=16), [FLUSH])
    assert [(option.profile.microbatch_size, option.microbatches) for option in roomy.options] == [
        (4, 16),
        (8, 8),
        (16, 4),
    ]
    assert {option.samples_per_minibatch for option in roomy.options} == {64}
    best = min(roomy.options, key=lambda option: option.seconds_per_sample)
    assert roomy.plan.microbatch_size == best.profile.microbatch_size != 4
    assert roomy.plan.profile_digest == best.profile.digest
    never = SolveOptions(microbatches=16, recompute="never")
    tight = choose(sizes, flat_cluster(4, 1e4, 2600), never, [FLUSH])
    assert tight.plan.microbatch_size == 4
    assert "batch size" in choice_report(roomy)


def test_profiles_that_do_not_compare_are_refused() -> None:
    cluster = flat_cluster(2, 1e3)
    other = deep(8).model_copy(update={"model": "other"})
    for profiles, message in (
        ([deep(4), other], "of different models"),
        ([deep(4), deep(4)], "two profiles have the batch size 4"),
        ([deep(4), deep(8).model_copy(update={"microbatch_size": None})], "does not know its batch size"),
        ([deep(4), deep(6)], "a minibatch of 32 samples cannot be divided into microbatches of 6"),
    ):
        with pytest.raises(InputError, match=message):
            choose(profiles, cluster)
