"""Whole plans priced, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.work import Work
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.schedule.one_stage import GPIPE
from tests.samples import layer, profile

# a feeds b; c uses b and, by a skip, a.
SKIP = profile(
    layer("a", 1, 2, output_bytes=10, saved_bytes=5),
    layer("b", 2, 4, output_bytes=20, weight_bytes=100),
    layer("c", 3, 6, update_s=1),
    edges=[("a", "b"), ("b", "c"), ("a", "c")],
)


def each(work: Work, *names: str) -> tuple[float, ...]:
    return tuple(float(getattr(work, name)) for name in names)


def test_a_value_travels_along_the_stages_that_use_it() -> None:
    layer_costs = LayerCosts(SKIP)
    first, second, third = (
        layer_costs.work(stage) for stage in candidates([[0], [1], [2]], [1, 1, 1])
    )
    # a goes to b, which hands it on to c beside its own output; gradients return the same way.
    assert each(first, "received_bytes", "sent_bytes") == (10, 10)
    assert each(second, "received_bytes", "sent_bytes") == (10 + 30, 30 + 10)
    assert each(third, "received_bytes", "sent_bytes") == (30, 30)
    assert each(second, "received_messages", "sent_messages") == (3, 3)


def test_a_value_that_only_passes_by_costs_the_stage_nothing() -> None:
    passing = profile(
        layer("a", output_bytes=10),
        layer("b", output_bytes=20),
        layer("c"),
        edges=[("a", "c"), ("b", "c")],
    )
    middle = LayerCosts(passing).work(candidates([[0], [1], [2]], [1, 1, 1])[1])
    # b's own value and its gradient
    assert each(middle, "received_bytes", "sent_bytes") == (20, 20)


def test_values_without_gradient_return_none() -> None:
    tokens = profile(layer("a", output_bytes=10, gradient=False), layer("b"))
    first, second = (LayerCosts(tokens).work(stage) for stage in candidates([[0], [1]], [1, 1]))
    assert each(first, "sent_bytes", "received_bytes", "received_messages") == (10, 0, 0)
    assert each(second, "received_bytes", "sent_bytes") == (10, 0)


def test_1f1b() -> None:
    cost = price(
        LayerCosts(SKIP), candidates([[0, 1], [2]], [2, 1]), Setting(flat_cluster(3, 100.0))
    )
    assert cost.seconds_per_minibatch == pytest.approx(10)  # c: 3 + 6 + 1
    assert (cost.bottleneck.stage, cost.bottleneck.resource) == (1, "compute")
    assert cost.in_flight == (2, 1)
    # 30 bytes each way, and 2·(2-1)·100 every two minibatches.
    assert cost.communication_bytes == pytest.approx(60 + 100)
    memory = cost.memory[0]
    assert memory.weights_bytes == 2 * 100
    assert memory.gradients_bytes == 100
    assert memory.activations_bytes == 2 * 5
    assert memory.communication_bytes == 2 * (30 + 30)


def test_a_slow_link_is_the_bottleneck() -> None:
    cost = price(LayerCosts(SKIP), candidates([[0, 1], [2]], [1, 1]), Setting(flat_cluster(2, 1.0)))
    assert (cost.bottleneck.stage, cost.bottleneck.resource, cost.seconds_per_minibatch) == (
        0,
        "link",
        30,
    )


def test_gpipe_is_the_sum_and_the_rest_of_the_slowest() -> None:
    cost = price(
        LayerCosts(SKIP),
        candidates([[0, 1], [2]], [1, 1]),
        Setting(flat_cluster(2, 100.0), GPIPE, 8),
    )
    transfers = 2 * 30 / 100
    # Stage 0 takes 9 per microbatch; stage 1 as long, and then updates.
    assert cost.seconds_per_minibatch == pytest.approx(9 + 9 + transfers + 7 * 9 + 1)
    assert cost.in_flight == (8, 8)
    assert cost.memory[0].weights_bytes == 100
    assert cost.communication_bytes == pytest.approx(8 * 60)


def test_one_microbatch_is_the_sum() -> None:
    cost = price(
        LayerCosts(SKIP), candidates([[0, 1], [2]], [1, 1]), Setting(flat_cluster(2, 100.0), GPIPE)
    )
    assert cost.seconds_per_minibatch == pytest.approx(9 + 9 + 1 + 2 * 30 / 100)
    assert cost.bottleneck.busy_s > 0


def test_combinations_without_meaning_are_refused() -> None:
    plan, cluster = candidates([[0, 1, 2]], [1]), flat_cluster(1, 1.0)
    with pytest.raises(InputError, match="`microbatches=2` does not apply"):
        price(LayerCosts(SKIP), plan, Setting(cluster, microbatches=2))
    with pytest.raises(InputError, match="0 microbatches"):
        price(LayerCosts(SKIP), plan, Setting(cluster, GPIPE, 0))
