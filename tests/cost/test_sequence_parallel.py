"""Groups that divide by tokens what each of their ranks would compute whole."""

from __future__ import annotations

import math

import pytest

from planner.cost.network.link import Link
from planner.cost.network.topology import Topology
from planner.cost.tensor import profile_at
from planner.formats.cluster import flat_cluster
from tests.samples import layer, profile
from tests.solver.test_degrees import divided


def test_what_every_rank_would_do_is_divided() -> None:
    norm = layer("norm", forward_s=4.0, backward_s=8.0, saved_bytes=400, output_bytes=100)
    product = layer("product", forward_s=4.0, backward_s=8.0, saved_bytes=400, output_bytes=100)
    product = product.model_copy(update={"forward_flops": 1})
    model = divided(profile(norm, product), 4)
    (costs,) = model.tensor or ()
    # Each of four ranks takes as long as one device for the norm. The products' results are summed,
    # in a second and a half.
    halves = {"forward_s": (4.0, 1.0), "backward_s": (8.0, 2.0), "saved_bytes": (400, 250)}
    counts = dict.fromkeys(("forward_reduces", "backward_reduces"), (0, 1))
    counts |= dict.fromkeys(("forward_reduced_bytes", "backward_reduced_bytes"), (0, 100))
    weights = {"weight_bytes": tuple(each.weight_bytes for each in model.layers)}
    model = model.model_copy(
        update={"tensor": (costs.model_copy(update=halves | counts | weights),)}
    )
    plain, by_tokens = (
        profile_at(model, 4, Link(100.0), sequence_parallel=flag) for flag in (False, True)
    )
    assert [each.forward_s for each in plain.layers] == pytest.approx([4.0, 2.5])
    assert [each.forward_s for each in by_tokens.layers] == pytest.approx([1.0, 2.5])
    assert [each.backward_s for each in by_tokens.layers] == pytest.approx([2.0, 3.5])
    assert [each.saved_bytes for each in by_tokens.layers] == [100, 100]
    assert [each.outputs[0].output_bytes for each in plain.layers] == [100, 100]
    assert [each.outputs[0].output_bytes for each in by_tokens.layers] == [25, 25]


def test_what_was_measured_by_tokens_is_taken_as_it_is() -> None:
    model = divided(profile(layer("norm"), layer("product")), 2)
    (costs,) = model.tensor or ()
    counts = {"forward_reduces": (0.0, 0.0), "backward_reduces": (0.0, 0.5)}
    counts |= {"forward_reduced_bytes": (0, 0), "backward_reduced_bytes": (0, 100)}
    measured = costs.model_copy(
        update={"forward_s": (0.25, 0.5), "backward_s": (0.5, 1.0), **counts}
    )
    model = model.model_copy(update={"tensor": (costs.model_copy(update={"by_tokens": measured}),)})
    by_tokens = profile_at(model, 2, Link(100.0, latency_s=0.125), sequence_parallel=True)
    assert [each.forward_s for each in by_tokens.layers] == [0.25, 0.5]
    # Half of an all-reduce's two steps, and a second for the bytes.
    assert [each.backward_s for each in by_tokens.layers] == [0.5, 1.0 + 0.125 + 1.0]
    assert profile_at(model, 2, Link(math.inf)).layers[0].forward_s == costs.forward_s[0]


def test_ranks_wait_for_a_share_of_what_they_computed_since_the_last_sum() -> None:
    """The first layer's time counts for the second one's all-reduces, of which each waits so long
    at most.
    """
    model = divided(profile(layer("norm"), layer("product"), layer("last")), 2)
    (costs,) = model.tensor or ()
    nothing = dict.fromkeys(("forward_reduced_bytes", "backward_reduced_bytes"), (0, 0, 0))
    times = {"forward_s": (1.0, 2.0, 8.0), "backward_s": (1.0, 2.0, 8.0)}
    counts = {"forward_reduces": (0, 2, 1), "backward_reduces": (1, 0, 0)}
    model = model.model_copy(
        update={"tensor": (costs.model_copy(update=nothing | times | counts),)}
    )
    divided_by_two = profile_at(model, 2, Link(100.0, wait_share=0.125, most_wait_s=0.5)).layers
    assert [each.forward_s for each in divided_by_two] == [1.0, 2.0 + 0.125 * 3, 8.0 + 0.5]
    assert [each.backward_s for each in divided_by_two] == [1.0 + 0.5, 2.0, 8.0]


def test_only_sums_are_waited_for() -> None:
    cluster = flat_cluster(2, 1000.0)
    rates = {"sum_bandwidth_bytes_per_s": 500.0, "sum_wait_share": 0.25, "sum_wait_s": 2.0}
    level = cluster.levels[0].model_copy(update=rates | {"gather_bandwidth_bytes_per_s": 100.0})
    topology = Topology(cluster.model_copy(update={"levels": (level,)}))
    group, gather = topology.group_link(2), topology.measured_link(range(2), "gather")
    assert (group.ring_bytes_per_s, group.wait_share, group.most_wait_s) == (500.0, 0.25, 2.0)
    assert gather is not None
    assert (gather.ring_bytes_per_s, gather.wait_share, gather.most_wait_s) == (100.0, 0.0, 0.0)
