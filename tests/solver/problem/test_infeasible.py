"""The smallest changes that are named do help, and nothing smaller would: held to the brute
force.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.clock import OutOfTimeError
from planner.solver.problem.infeasible import explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.search.pipeline_search import PipelineSearch
from planner.units import parse_bytes
from tests.cost.test_overheads import on_cuda
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles


@settings(max_examples=examples(60), deadline=None)
@given(
    model=profiles(most_layers=4, linear=True),
    gpus=st.integers(1, 3),
    memory=st.integers(1, 40),
    how=st.sampled_from([("1f1b", 1), ("gpipe", 2), ("1f1b-flush", 2), ("2bw", 3)]),
)
def test_named_memory_and_gpus_against_brute_force(
    model: Profile, gpus: int, memory: int, how: tuple[str, int]
) -> None:
    schedule, microbatches = how

    def fits(count: int, size: int) -> bool:
        cluster = flat_cluster(count, 4.0, size)
        layer_costs = LayerCosts(model)
        found = brute_force(
            layer_costs,
            cluster,
            schedule=find(schedule),
            microbatches=microbatches,
            recompute="auto",
        )
        return found is not None

    try:
        solve(model, flat_cluster(gpus, 4.0, memory), schedule=schedule, microbatches=microbatches)
    except InfeasibleError as error:
        caught = error
    else:
        assume(False)
    assert caught.exit_code == 3
    assert not fits(gpus, memory)
    found = re.search(r"`memory=(\w+)`", caught.hint)
    assert found is not None
    smallest = parse_bytes(found[1])
    assert fits(gpus, smallest)
    assert not fits(gpus, smallest - 1)
    more = re.search(r"`gpus=(\d+)`", caught.hint)
    if more is not None and int(more[1]) <= 5:
        assert fits(int(more[1]), memory)
        assert not fits(int(more[1]) - 1, memory)


def test_the_stage_and_the_bytes_are_named() -> None:
    """Two layers that fit alone: 300 and 400 bytes of weights and gradients, on one GPU of 500."""
    model = profile(layer("small", weight_bytes=150), layer("large", weight_bytes=200), edges=[])
    with pytest.raises(InfeasibleError) as caught:
        solve(model, flat_cluster(1, 1.0, 500))
    assert "stage 0 (layers 'small' to 'large') needs 700 B, 200 B too much" in caught.value.message
    assert (
        caught.value.hint == "the smallest memory that would do is `memory=700B`; so would `gpus=2`"
    )


def tight_problem() -> Problem:
    """Two layers that fit alone: 300 and 400 bytes of weights and gradients, on one GPU of 500."""
    model = profile(layer("small", weight_bytes=150), layer("large", weight_bytes=200), edges=[])
    return Problem(LayerCosts(model), Setting(flat_cluster(1, 1.0, 500), find("1f1b"), 1))


def test_a_memory_that_processes_take_without_tensors_is_told_as_it_was_given() -> None:
    model = on_cuda(profile(layer("only", weight_bytes=8)), context_bytes=300 * 10**6)
    with pytest.raises(InfeasibleError) as caught:
        solve(model, flat_cluster(2, 1e9, memory_bytes=10 * 10**6))
    assert caught.value.message.startswith("no plan fits 2 GPUs of 10 MB: the context")
    assert "take 300 MB of each" in caught.value.message


@pytest.mark.parametrize("calls", range(12))
def test_a_clock_within_the_searches_leaves_an_answer(calls: int) -> None:
    """Whichever search for a change that would help runs out of time, the error says what was found
    by then.
    """
    problem = tight_problem()
    search, count = PipelineSearch(problem), 0

    def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
        nonlocal count
        count += 1
        if count > calls:
            raise OutOfTimeError
        return search.fits(gpus, memory_bytes)

    error = explain(problem, fits, {"`recompute=auto`": fits})
    assert error.exit_code == 3
    assert error.message.startswith("no plan fits 1 GPU of 500 B")
    if calls < 2:  # whether any memory would do, and then twice the memory
        assert "the time for the search ran out before it was known what would" in error.hint
    else:
        assert "needs 700 B, 200 B too much" in error.message
        assert "`memory=700B`" in error.hint
