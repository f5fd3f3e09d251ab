"""Experts that ranks divide across servers: what a rank has and sends, by counting."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cost.network.topology import Topology
from planner.cost.tensor import profile_at
from planner.errors import PlanError
from planner.formats.cluster import hierarchical_cluster
from planner.formats.profile import Profile
from planner.model.spec import load_model_file
from planner.plan.rank_groups import usual_degrees
from planner.plan.trainable import check_base
from planner.profiler.estimated.estimate import EstimateOptions, Estimator
from planner.solver import search_plan
from tests.executor.models import write_model

RATE, BETWEEN = 300e9, 400e9
EXPERTS, CHOSEN, WIDTH, TOKENS = 4, 2, 16, 8
EXPERT_NUMBERS = EXPERTS * (48 * 16 + 16 * 24)  # weights of a layer's experts


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Two blocks of four experts, of which a token chooses two; microbatches of 8 samples."""
    folder: Path = tmp_path_factory.mktemp("experts")
    spec = load_model_file(write_model(folder, "experts", "adamw"))
    options = EstimateOptions("h100", "bfloat16", master_weights=True, experts=(2, 4, 8))
    estimator = Estimator(spec, options)
    return estimator.divided(estimator.profile(8))


def test_a_rank_has_its_experts_and_all_else(divided: Profile) -> None:
    costs = {each.degree: each for each in divided.tensor or ()}
    assert set(costs) == {2, 4}  # eight ranks are more than there are experts
    whole = sum(layer.weight_bytes for layer in divided.layers)
    experts = 2 * 2 * EXPERT_NUMBERS  # blocks, bytes
    for degree, each in costs.items():
        assert each.by_samples
        assert sum(each.weight_bytes) == whole - experts + experts // degree
        alike = sum(each.alike_bytes or ())
        gradients = sum(layer.gradient_bytes for layer in divided.layers)
        assert alike == pytest.approx(gradients * (1 - experts / whole), rel=1e-6)


def test_rows_are_sent_to_experts_and_back(divided: Profile) -> None:
    """Each of a rank's tokens sends two rows of half precision per block, and gets two back."""
    for each in divided.tensor or ():
        tokens = 8 // each.degree * TOKENS
        sent = 2 * CHOSEN * tokens * WIDTH * 2
        # an all-to-all is half an all-reduce
        assert sum(each.forward_reduced_bytes) == 2 * sent / 2
        assert each.forward_reduced_bytes == each.backward_reduced_bytes
        assert sum(each.forward_reduces) == 2 * 2


def test_all_to_alls_take_the_slowest_level() -> None:
    """Of 32 ranks in servers of 8 each sends 24/32 of its bytes over an eighth of its server's
    link; of 8 ranks in one server nothing leaves it.
    """
    topology = Topology(hierarchical_cluster((8, 8), (RATE, BETWEEN)))
    inside, across = topology.exchange_link(8), topology.exchange_link(32)
    assert inside == topology.group_link(8)
    size_bytes = 1e9
    seconds = (31 / 32) * size_bytes / across.ring_bytes_per_s
    assert seconds == pytest.approx(24 / 32 * size_bytes / (BETWEEN / 8))


def test_a_token_is_sent_to_a_server_once() -> None:
    """Of 8 chosen experts in 4 servers a server has one for 1 - (3/4)^8 of the tokens, where 2 of 8
    copies would go to each.
    """
    topology = Topology(hierarchical_cluster((8, 8), (RATE, BETWEEN)))
    plain, once = (topology.exchange_link(32, copies=copies) for copies in (None, 8))
    expected = (1 - (3 / 4) ** 8) / 2
    assert plain.ring_bytes_per_s / once.ring_bytes_per_s == pytest.approx(expected)


def test_slow_links_inside_bind() -> None:
    topology = Topology(hierarchical_cluster((8, 2), (1e9, BETWEEN)))
    link = topology.exchange_link(16)
    assert (15 / 16) / link.ring_bytes_per_s == pytest.approx(7 / 16 / 1e9)


def test_what_all_ranks_have_alike_is_summed_once(divided: Profile) -> None:
    topology = Topology(hierarchical_cluster((2, 2), (RATE, BETWEEN)))
    link, exchange = topology.group_link(4), topology.exchange_link(4)
    costs = next(each for each in divided.tensor or () if each.degree == 4)
    rank = profile_at(divided, 4, link, exchange=exchange)
    more_s = sum(layer.update_s for layer in rank.layers) - sum(costs.update_s)
    alike = sum(costs.alike_bytes or ())
    latencies = 6 * link.latency_s * sum(1 for each in costs.alike_bytes or () if each)
    assert more_s == pytest.approx(1.5 * alike / link.ring_bytes_per_s + latencies)


def test_groups_of_whole_servers_are_usual_where_they_divide_experts(divided: Profile) -> None:
    assert usual_degrees(divided, hierarchical_cluster((2, 2), (RATE, BETWEEN))) == (1, 2, 4)
    plain = divided.model_copy(
        update={
            "tensor": tuple(
                each.model_copy(update={"alike_bytes": None}) for each in divided.tensor or ()
            )
        }
    )
    assert usual_degrees(plain, hierarchical_cluster((2, 2), (RATE, BETWEEN))) == (1, 2)


def test_such_plans_are_not_trained(divided: Profile) -> None:
    cluster = hierarchical_cluster((2, 2), (RATE, BETWEEN))
    plan = search_plan(divided, cluster, schedule="1f1b-flush", tensor=(4,))
    assert plan.experts_across
    assert plan.experts == EXPERTS
    with pytest.raises(PlanError, match="planned and priced, not trained by this package yet"):
        check_base(plan)
