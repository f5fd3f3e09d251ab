"""What stages hold of weights that an earlier one has, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.analysis.given_plan import price
from planner.cost.candidate import StageOptions, candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.tensor import layer_costs_on
from planner.cost.weight_copies import counted_with_copies, exchanged_bytes
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.simulator.simulate_plan import costs_of, simulate
from planner.simulator.summary import summarize
from planner.solver import search_plan as solve
from tests.samples import layer, profile
from tests.solver.test_degrees import divided


def tied() -> Profile:
    """An embedding whose weight the head uses, too, and two layers between; the weight counts in
    the embedding.
    """
    made = profile(
        layer("embedding", 200, 200, output_bytes=8, weight_bytes=10**6),
        layer("one", 200, 400, output_bytes=8, weight_bytes=10**6),
        layer("two", 200, 400, output_bytes=8, weight_bytes=10**6),
        layer("head", 200, 400),
    )
    names = (("embed.weight",), ("one.weight",), ("two.weight",), ("embed.weight",))
    layers = tuple(
        each.model_copy(update={"parameters": own, "optimizer_bytes": 2 * each.weight_bytes})
        for each, own in zip(made.layers, names, strict=True)
    )
    return made.model_copy(update={"layers": layers})


def test_a_copy_is_in_the_plan_and_in_its_memory() -> None:
    plan = solve(tied(), flat_cluster(4, 1e3), schedule="gpipe", microbatches=4)
    assert plan.config == "1-1-1-1"
    (shared,) = plan.shared
    assert (shared.stages, shared.weights, shared.gradient_bytes) == (
        (0, 3),
        ("embed.weight",),
        10**6,
    )
    head = plan.stages[3].memory
    assert (head.weights_bytes, head.gradients_bytes, head.optimizer_bytes) == (
        10**6,
        2 * 10**6,
        2 * 10**6,
    )
    assert plan.stages[2].memory.weights_bytes == 10**6


def test_replicas_divide_the_state_of_copies_but_sum_their_gradients_whole() -> None:
    """The other stage needs all of the gradients; each replica then updates its part, and all
    gather the weights.
    """
    schedule = find("gpipe")
    stages = (
        OwnStage(layers=("embedding", "one"), replicas=2),
        OwnStage(layers=("two", "head"), replicas=2),
    )
    divided = tuple(stage.model_copy(update={"sharded": True}) for stage in stages)
    cluster = flat_cluster(4, 1e3)
    plain, sharded = (
        price(tied(), cluster, OwnPlan(stages=each, schedule=schedule, microbatches=4))
        for each in (stages, divided)
    )
    assert [stage.memory.optimizer_bytes for stage in plain.stages] == [4 * 10**6] * 2
    assert [stage.memory.optimizer_bytes for stage in sharded.stages] == [2 * 10**6] * 2
    for plan, megabytes in ((plain, 12), (sharded, 14)):
        # Two stages of two replicas all-reduce or reduce, and gather; each replica gets the other
        # stage's gradients.
        rings = sum(
            2 * (each.reduced_bytes + each.gathered_bytes) for each in costs_of(plan).stages
        )
        cut = 4 * 2 * 8
        samples = plan.minibatch_size
        assert samples is not None
        assert plan.predicted.communication_bytes_per_sample == (rings + 4 * 10**6 + cut) / samples
        assert rings + 4 * 10**6 == megabytes * 10**6
    for before, after in zip(costs_of(plain).stages, costs_of(sharded).stages, strict=True):
        assert (before.reduced_bytes, before.gathered_bytes) == (2 * 10**6, 0)
        assert (after.reduced_bytes, after.gathered_bytes) == (10**6 + 10**6 // 2, 10**6)


def test_messages_with_the_gradients_of_copies_are_in_the_memory() -> None:
    """What a stage has sent, to each replica that it serves, and what it receives."""
    layer_costs = LayerCosts(tied())
    assert exchanged_bytes(layer_costs, candidates([[0], [1], [2], [3]], [1, 1, 1, 1])) == [
        2 * 10**6,
        0,
        0,
        2 * 10**6,
    ]
    assert exchanged_bytes(layer_costs, candidates([[0], [1, 2], [3]], [2, 1, 3])) == [
        3 * 10**6,
        0,
        2 * 10**6,
    ]
    assert exchanged_bytes(layer_costs, candidates([[0, 1, 2, 3]], [2])) == [0]
    # The second stage is two rounds ahead of the first: three sent, two of its own, and one
    # received.
    assert exchanged_bytes(layer_costs, candidates([[0, 1, 2], [3]], [1, 1]), (3, 1)) == [
        2 * 10**6,
        6 * 10**6,
    ]
    # Each rank of a group has half of the weight.
    groups = [
        replace(stage, options=StageOptions(tensor=2))
        for stage in candidates([[0], [1, 2], [3]], [1, 1, 1])
    ]
    on_groups = layer_costs_on(divided(tied(), 2), flat_cluster(6, 1e3))
    assert exchanged_bytes(on_groups, groups) == [10**6, 0, 10**6]
    plan = solve(tied(), flat_cluster(4, 1e3), schedule="gpipe", microbatches=4)
    messages = 2 * 2 * 8  # of each cut, received and sent, two at once
    communication = [stage.memory.communication_bytes for stage in plan.stages]
    assert communication == [2 * 10**6 + messages, 2 * messages, 2 * messages, 2 * 10**6 + messages]
    held = simulate(plan).memory[0].held_bytes
    assert min(held) >= 2 * 10**6 + plan.stages[0].memory.weights_bytes


def test_a_profile_that_counts_every_copy() -> None:
    counted = counted_with_copies(tied())
    assert counted is not None
    assert [layer.gradient_bytes for layer in counted.layers] == [10**6] * 4
    assert [layer.optimizer_bytes for layer in counted.layers] == [2 * 10**6] * 4
    assert counted.layers[:3] == tied().layers[:3]
    on_groups = counted_with_copies(divided(tied(), 2))
    assert on_groups is not None
    assert on_groups.tensor is not None
    assert on_groups.tensor[0].gradient_bytes == (5 * 10**5,) * 4
    assert counted_with_copies(profile(layer("a", output_bytes=8), layer("b"))) is None


def test_a_copy_that_does_not_fit_is_no_plan() -> None:
    plan = solve(tied(), flat_cluster(4, 1e3), schedule="gpipe", microbatches=4)
    limit = plan.stages[3].memory.total_bytes - 1
    assert plan.stages[0].memory.total_bytes <= limit
    with pytest.raises(
        InfeasibleError, match=r"what stage \d holds for that does not fit"
    ) as raised:
        solve(tied(), flat_cluster(4, 1e3, limit), schedule="gpipe", microbatches=4)
    assert "more memory" in raised.value.hint


def test_the_simulation_sends_the_gradients_of_copies() -> None:
    """1 kB/s: a megabyte each way at the end of every minibatch, before anything of the next can
    begin.
    """
    slow = flat_cluster(4, 1e3)
    plan = solve(tied(), slow, schedule="gpipe", microbatches=4)
    without = plan.model_copy(update={"shared": ()})
    ends = [simulate(each).span_s for each in (plan, without)]
    assert ends[0] > ends[1]


def test_a_copy_is_updated_too_and_its_gradients_add_up() -> None:
    layers = [
        each.model_copy(update={"update_s": number / 1e3, "accumulate_s": number / 1e4})
        for number, each in enumerate(tied().layers, 7)
    ]
    model = tied().model_copy(update={"layers": tuple(layers)})
    plan = solve(model, flat_cluster(4, 1e3), schedule="gpipe", microbatches=4)
    assert plan.config == "1-1-1-1"
    assert [stage.update_s for stage in plan.stages] == pytest.approx(
        [0.007, 0.008, 0.009, 0.010 + 0.007]
    )
    assert [stage.accumulate_s for stage in plan.stages] == pytest.approx(
        [0.0007, 0.0008, 0.0009, 0.0010 + 0.0007]
    )
    assert plan.predicted.seconds_per_minibatch == pytest.approx(
        summarize(simulate(plan)).seconds_per_minibatch
    )
