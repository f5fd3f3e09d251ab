"""Plans whose stages divide layers over ranks, against all plans, and as files."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from planner.analysis import given_plan
from planner.analysis.given_plan import GivenPlan
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link, ring_all_reduce_s
from planner.cost.network.topology import Topology
from planner.cost.overheads import COMMUNICATOR_BYTES
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.tensor import layer_costs_on, profile_at
from planner.errors import ClusterError, InfeasibleError, PlannerError
from planner.exports import export
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.files import replace
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Profile
from planner.options.solving import StageRules
from planner.plan.rank_groups import groups_of, of_groups, plan_of_tensor_rank
from planner.plan.shape import shape_of
from planner.plan.trainable import check_base, check_trainable
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulate, simulated_s
from planner.solver import search_plan as solve
from planner.solver.assemble import assemble
from planner.solver.clock import Clock
from planner.solver.find_plan import best_over_degrees
from planner.solver.portfolio import best_plan
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.solver.search.pipeline_search import PipelineSearch
from planner.units import parse_bytes
from tests.cost.test_overheads import on_cuda
from tests.samples import layer, profile
from tests.solver.every_plan import EveryPlan
from tests.solver.test_new_axes import random_model

ASYNCHRONOUS = ("1f1b", "1f1b", "2bw")


def divided(model: Profile, *degrees: int, rng: np.random.Generator | None = None) -> Profile:
    """Let every layer be divided, some of them badly, with all-reduces of a few bytes."""
    shares = (
        rng.uniform(0.3, 1.0, len(model.layers)) if rng is not None else np.ones(len(model.layers))
    )
    known = []
    for degree in degrees:
        kept = 1 - shares * (1 - 1 / degree)
        columns: dict[str, Any] = {
            name: tuple(
                getattr(each, name) * part
                if name.endswith("_s")
                else round(getattr(each, name) * part)
                for each, part in zip(model.layers, kept.tolist(), strict=True)
            )
            for name in DEGREE_COLUMNS
        }
        some, once = (2,) * len(model.layers), (1,) * len(model.layers)
        known.append(
            DegreeCosts(
                degree=degree,
                source="estimated",
                forward_reduced_bytes=some,
                backward_reduced_bytes=some,
                forward_reduces=once,
                backward_reduces=once,
                **columns,
            )
        )
    return model.model_copy(update={"tensor": tuple(known)})


def random_problem(rng: np.random.Generator) -> Problem:
    schedule = find(str(rng.choice(ASYNCHRONOUS)))
    model = divided(random_model(rng), 2, 3, rng=rng)
    gpus, microbatches = int(rng.integers(3, 7)), int(rng.integers(1, 9)) if schedule.divides else 1
    names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes")
    everything = sum(getattr(each, name) for each in model.layers for name in names)
    memory = None if rng.random() < 0.2 else 1 + int(everything * rng.uniform(0.15, 0.8))
    cluster = flat_cluster(
        gpus, float(rng.choice([0.5, 2.0, 8.0, 1e4])), memory, float(rng.choice([0.0, 0.25]))
    )
    rules = StageRules(
        recompute=("auto", "auto", "never", "always")[int(rng.integers(4))],
        shard_optimizer=("auto", "never")[int(rng.integers(2))],
        tensor=((1, 2), (1, 2, 3), (2, 3))[int(rng.integers(3))],
    )
    return Problem(layer_costs_on(model, cluster), Setting(cluster, schedule, microbatches), rules)


def check(seed: int) -> tuple[bool, bool]:
    """Compare one instance; return whether there is a plan, and whether its stages are divided."""
    problem = random_problem(np.random.default_rng([19, seed]))
    searches = {
        degree: PipelineSearch(problem.on_groups_of(degree)) for degree in problem.rules.tensor
    }
    paths = {
        degree: path for degree, search in searches.items() if (path := search.best()) is not None
    }
    expected = EveryPlan(problem).best()
    assert (not paths) == (expected is None), seed
    if expected is None:
        return False, False
    degree = min(paths, key=lambda degree: paths[degree].seconds)
    path, search = paths[degree], searches[degree]
    assert path.seconds == pytest.approx(expected[0], rel=1e-9), seed
    assert path.gpus * degree <= problem.cluster.gpus, seed
    assert min(search.relaxed_s() for search in searches.values()) <= path.seconds * (1 + 1e-9), (
        seed
    )
    stages = search.priced(path).divided(degree).stages
    for plan in (stages, expected[1]):  # the price of the whole plan is that of its stages
        priced = price(problem.layer_costs, plan, problem.setting)
        assert priced.seconds_per_minibatch == pytest.approx(expected[0], rel=1e-9), seed
        assert (
            problem.cluster.memory_bytes is None
            or max(priced.gpu_bytes) <= problem.cluster.memory_bytes
        ), seed
    return True, degree > 1


def test_the_search_finds_what_every_plan_says() -> None:
    found = np.sum([check(seed) for seed in range(60)], axis=0)
    assert np.all(found > 3)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_the_search_finds_what_every_plan_says_on_a_thousand_models(part: int) -> None:
    found = np.sum([check(seed) for seed in range(100 * part, 100 * part + 100)], axis=0)
    assert np.all(found > 5)


CHAIN = divided(
    profile(
        *(
            layer(f"l{n}", 1.0, 2.0, output_bytes=20, weight_bytes=40, saved_bytes=30)
            for n in range(8)
        )
    ),
    2,
    4,
)
FLAT = flat_cluster(8, 100.0, 300)
LEVELS = hierarchical_cluster((4, 2), (1000.0, 50.0), 300)


@pytest.mark.parametrize("cluster", [FLAT, LEVELS], ids=["flat", "levels"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "zb-h1"])
def test_a_divided_plan_is_solved_priced_and_simulated_alike(
    schedule: str, cluster: Cluster
) -> None:
    plan = solve(
        CHAIN,
        cluster,
        schedule=schedule,
        microbatches=1 if schedule == "1f1b" else 8,
        tensor=(1, 2, 4),
    )
    seconds = plan.predicted.seconds_per_minibatch
    assert max(plan.degrees) > 1
    assert "x" in plan.config
    assert plan.profile_digest == CHAIN.digest
    assert plan.cluster == cluster
    assert plan.solver.lower_bound_s <= seconds
    assert simulated_s(plan) == pytest.approx(seconds, rel=1e-9)
    assert simulate(plan).ranks == shape_of(of_groups(plan)).ranks
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    given = GivenPlan.of(CHAIN, plan, Clock())
    priced = given_plan.priced_plan(given.request, given.stages, accepts_loss=False)
    # without limits of memory
    assert priced.predicted.seconds_per_minibatch <= seconds * (1 + 1e-9)
    assert given.price().communication_bytes >= 0
    assert len(set(plan.degrees)) == 1
    check_trainable(plan)


@pytest.mark.parametrize(
    "cluster", [flat_cluster(8, 100.0, 20), flat_cluster(4, 100.0, 30)], ids=["8", "4"]
)
def test_what_does_not_fit_is_said_in_gpus_and_of_the_degree_that_needs_least(
    cluster: Cluster,
) -> None:
    how: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 8}
    with pytest.raises(InfeasibleError) as caught:
        solve(CHAIN, cluster, tensor=(1, 2, 4), **how)
    assert caught.value.message.startswith(
        f"no plan fits {cluster.gpus} GPUs of {cluster.memory_bytes} B"
    )
    least = []
    for degree in (1, 2, 4):
        with pytest.raises(InfeasibleError) as of_degree:
            solve(CHAIN, cluster, tensor=(degree,), **how)
        least.append(of_degree.value.least_bytes)
    assert caught.value.least_bytes == min(least)
    assert len(set(least)) > 1
    memory, gpus = (re.search(rf"`{name}=(\w+)`", caught.value.hint) for name in ("memory", "gpus"))
    assert memory is not None
    larger = [flat_cluster(cluster.gpus, 100.0, parse_bytes(memory[1]))]
    larger += [] if gpus is None else [flat_cluster(int(gpus[1]), 100.0, cluster.memory_bytes)]
    for each in larger:
        solve(CHAIN, each, tensor=(1, 2, 4), **how)


@pytest.mark.parametrize(
    ("degrees", "copies"), [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((1, 4), (4, 1)), ((2, 2), (1, 1))]
)
def test_a_larger_group_is_sent_as_many_copies_as_it_takes_to_reach_all(
    degrees: tuple[int, int], copies: tuple[int, int]
) -> None:
    model = divided(profile(layer("a", 1.0, 2.0, output_bytes=200), layer("b", 1.0, 2.0)), 2, 4)
    stages = tuple(
        OwnStage(layers=(name,), tensor=degree) for name, degree in zip("ab", degrees, strict=True)
    )
    own = OwnPlan(stages=stages, schedule=find("1f1b-flush"), microbatches=1)
    plan = given_plan.price(model, flat_cluster(sum(degrees), 100.0), own)
    computed_s = sum(stage.forward_s + stage.backward_s + stage.update_s for stage in plan.stages)
    sent_s = sum(copies) * 200 / 100.0
    assert max(simulate(plan, 1).events.end_s) == pytest.approx(computed_s + sent_s)
    assert plan.predicted.seconds_per_minibatch == pytest.approx(computed_s + sent_s)
    assert simulated_s(plan) == pytest.approx(computed_s + sent_s)


def test_groups_of_one_size_are_devices_of_another_cluster() -> None:
    servers = hierarchical_cluster((8, 4), (1000.0, 50.0))
    assert [level.size for level in groups_of(servers, 4).levels] == [2, 4]
    # which all four ranks use at once
    assert groups_of(servers, 4).levels[1].bandwidth_bytes_per_s == 50.0 / 4
    assert [level.size for level in groups_of(servers, 16).levels] == [1, 2]
    assert groups_of(flat_cluster(10, 1.0), 4).gpus == 2
    with pytest.raises(ClusterError, match="do not fill"):
        groups_of(servers, 3)
    with pytest.raises(ClusterError, match="make no group"):
        groups_of(servers, 64)


def test_two_ranks_that_divide_a_layer_evenly_take_half_of_it_and_their_all_reduces() -> None:
    own = OwnPlan(
        stages=(OwnStage(layers=tuple(each.name for each in CHAIN.layers), tensor=2),),
        schedule=find("1f1b-flush"),
        microbatches=1,
    )
    plan = given_plan.price(divided(CHAIN, 2), flat_cluster(2, 100.0), own)
    # Eight layers, a forward of 0.5 s and a backward of 1 s each, and all-reduces of 2 bytes that
    # move 2 bytes.
    assert plan.predicted.seconds_per_minibatch == pytest.approx(8 * (0.5 + 1.0 + 2 * 2 / 100.0))
    assert plan.config == "1x2"
    assert plan.stages[0].ranks == (0, 1)
    assert plan.predicted.communication_bytes_per_sample == 0


def test_ranks_with_samples_of_their_own_exchange_a_part_and_their_plan_says_so() -> None:
    """Whether they also divide by tokens makes no difference, for none has the tokens of
    another.
    """
    (costs,) = divided(CHAIN, 2).tensor or ()
    costs = costs.model_copy(update={"by_samples": True, "experts": (0, 16) * 4})
    model = CHAIN.model_copy(update={"tensor": (costs,)})
    for sequence_parallel in (False, True):
        group = profile_at(model, 2, Link(100.0), sequence_parallel=sequence_parallel)
        assert [value.output_bytes for each in group.layers for value in each.outputs] == [10] * 8
        assert [each.saved_bytes for each in group.layers] == list(costs.saved_bytes)
    plan = solve(model, FLAT, schedule="1f1b-flush", microbatches=8, tensor=(2,))
    assert (plan.experts, plan.by_samples) == (16, True)
    assert {(each.output_bytes, each.gradient_bytes) for each in plan.transfers} == {(10, 10)}
    assert simulated_s(plan) == pytest.approx(plan.predicted.seconds_per_minibatch, rel=1e-9)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert (
        plan_of_tensor_rank(plan.model_copy(update={"microbatch_size": 6}), 1).microbatch_size == 3
    )
    whole = solve(CHAIN, FLAT, schedule="1f1b-flush", microbatches=8)
    assert not {"experts", "by_samples"} & whole.model_dump().keys()
    assert Profile.model_validate_json(CHAIN.model_dump_json()).digest == CHAIN.digest
    assert "by_samples" not in CHAIN.model_dump_json(exclude_none=True)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-flush", "zb-h1"])
def test_messages_share_the_links_of_a_group_with_its_exchanges(schedule: str) -> None:
    """But not where groups are in servers, whose inner links are faster; alone, an exchange is not
    slower.
    """
    model = divided(profile(*(layer(f"l{n}", 0.1, 0.2, output_bytes=300) for n in range(8))), 2)
    (costs,) = model.tensor or ()
    exchanged = {"forward_reduced_bytes": (50,) * 8, "backward_reduced_bytes": (50,) * 8}
    model = model.model_copy(update={"tensor": (costs.model_copy(update=exchanged),)})
    stages = tuple(
        OwnStage(layers=tuple(f"l{n}" for n in range(first, first + 4)), tensor=2)
        for first in (0, 4)
    )
    many = 1 if schedule == "1f1b" else 16
    own = OwnPlan(stages=stages, schedule=find(schedule), microbatches=many)
    flat, servers = flat_cluster(4, 100.0), hierarchical_cluster((2, 2), (100.0, 600.0))
    plan, apart = (given_plan.price(model, cluster, own) for cluster in (flat, servers))
    # Each way, a microbatch's exchanges take 4 s of the link of a rank, and its message 3 s; a
    # stage computes 0.6 s.
    assert plan.predicted.seconds_per_minibatch >= 7 * many * (1 - 1e-9)
    assert apart.predicted.seconds_per_minibatch < 7 * many
    assert simulated_s(plan) == pytest.approx(plan.predicted.seconds_per_minibatch, rel=1e-9)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert all(
        stage.exchanged is not None and stage.exchanged.forward_bytes == 200
        for stage in plan.stages
    )
    assert "exchanged" not in apart.stages[0].model_dump()
    whole = own.model_copy(
        update={"stages": (OwnStage(layers=tuple(f"l{n}" for n in range(8)), tensor=2),)}
    )
    alone = given_plan.price(model, flat, whole)
    assert alone.stages[0].exchanged is not None
    assert simulated_s(alone) == pytest.approx(many * (8 * 0.15 + 8))


def test_what_is_not_known_is_refused() -> None:
    for tensor, words in (
        ((1, 8), "does not say what its layers cost on 8 ranks"),
        ((2, 1), "no ascending"),
    ):
        with pytest.raises(PlannerError, match=words):
            solve(CHAIN, FLAT, tensor=tensor)
    columns = CHAIN.tensor[0].model_dump() if CHAIN.tensor else {}
    with pytest.raises(ValueError, match="has not one value for each of 8 layers"):
        Profile.model_validate(CHAIN.model_dump() | {"tensor": [columns | {"update_s": (0.0,)}]})


def test_old_files_mean_what_they_meant() -> None:
    plain = CHAIN.model_copy(update={"tensor": None})
    plan = solve(plain, flat_cluster(8, 100.0))
    assert "tensor" not in plan.model_dump_json()
    assert plain.digest == Profile.model_validate_json(plain.model_dump_json()).digest


def test_a_degree_that_had_too_little_time_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = divided(
        profile(*(layer(f"l{n}", 100, 200, output_bytes=8, weight_bytes=10) for n in range(4))), 2
    )
    cluster = flat_cluster(4, 1e3)
    rules = StageRules(tensor=(1, 2))
    problem = Problem(
        layer_costs_on(model, cluster), Setting(cluster, find("1f1b-flush"), 4), rules
    )

    def late(asked: Problem, *, both: bool = False) -> Answer:
        if both or asked.degree == 1:
            raise PlannerError("the time limit passed")
        return best_plan(asked)

    monkeypatch.setattr("planner.solver.find_plan.best_plan", late)
    assert {stage.options.tensor for stage in best_over_degrees(problem).best.stages} == {2}
    monkeypatch.setattr("planner.solver.find_plan.best_plan", partial(late, both=True))
    with pytest.raises(PlannerError, match="the time limit passed"):
        best_over_degrees(problem)


def test_degrees_that_the_time_did_not_suffice_for_are_named() -> None:
    """As on a busy machine: the first degree has an answer, and the time is over before the next.

    Replicas exchange gradients at the end, so that no degree's bound rules out the others.
    """
    layers = (layer(f"l{n}", 1, 2, output_bytes=10**8, weight_bytes=10**9) for n in range(8))
    model = divided(profile(*layers), 2, 4)
    asked = partial(solve, model, flat_cluster(8, 1e9), schedule="1f1b-flush", microbatches=8)
    plan = asked(tensor=(1, 2, 4), time_limit_s=0.0)
    assert plan.ranks_per_replica == 2
    assert plan.notes == (
        "the time limit ended the search of whole layers and layers sharded over 4 ranks",
    )

    assert not asked(tensor=(1, 2, 4)).notes
    assert not asked(tensor=(4,), time_limit_s=0.0).notes


def test_groups_of_ranks_have_room_for_their_own_communicator() -> None:
    """Of plans that divide layers none is chosen that lacks what the ranks of a group exchange by.

    Memory is limited at every tenth of a communicator, so that some plans just fit without it.
    """
    layers = (
        layer(f"l{n}", 1, 2, output_bytes=10, weight_bytes=10**8, saved_bytes=10**8)
        for n in range(4)
    )
    model = on_cuda(divided(profile(*layers), 2), context_bytes=3 * 10**8)
    answers = 0
    for memory_bytes in range(6 * 10**8, 20 * 10**8, COMMUNICATOR_BYTES // 10):
        cluster = flat_cluster(4, 1e12, memory_bytes)
        try:
            plan = solve(
                model,
                cluster,
                schedule="1f1b-flush",
                microbatches=4,
                tensor=(2,),
                recompute="never",
            )
        except InfeasibleError:
            continue
        answers += 1
        assert not any(map(plan.lacking_bytes, range(len(plan.stages)))), memory_bytes
    assert answers > 20


KINDS = tuple(DeviceKind(name=name, count=4) for name in ("one", "two"))
OF_KINDS = replace(hierarchical_cluster((4, 2), (100.0, 10.0)), kinds=KINDS)
IN_GROUPS = OwnPlan(
    stages=(
        OwnStage(layers=tuple(each.name for each in CHAIN.layers[:4]), replicas=2, tensor=2),
        OwnStage(layers=tuple(each.name for each in CHAIN.layers[4:]), replicas=2, tensor=2),
    ),
    schedule=find("1f1b-flush"),
    microbatches=4,
)


def times_as_long(model: Profile, times: float) -> Profile:
    """Return the profile of a slower device."""
    seconds = ("forward_s", "backward_s", "update_s")
    layers = tuple(
        each.model_copy(update={name: times * getattr(each, name) for name in seconds})
        for each in model.layers
    )
    return divided(model.model_copy(update={"layers": layers, "tensor": None}), 2)


def test_two_kinds_that_are_alike_divide_layers_as_one_does() -> None:
    model = divided(CHAIN, 2)
    both = profile_of_kinds({"one": model, "two": model})
    plain = given_plan.price(model, replace(OF_KINDS, kinds=()), IN_GROUPS)
    alike = given_plan.price(both, OF_KINDS, IN_GROUPS)
    assert alike.config == plain.config == "2x2-2x2"
    assert alike.predicted == plain.predicted
    assert [stage.ranks for stage in alike.stages] == [stage.ranks for stage in plain.stages]


def test_each_kind_divides_layers_in_its_own_time_and_over_its_own_links() -> None:
    fast, slow = divided(CHAIN, 2), times_as_long(CHAIN, 3.0)
    mixed = given_plan.price(profile_of_kinds({"one": fast, "two": slow}), OF_KINDS, IN_GROUPS)
    alone = [
        given_plan.price(each, replace(OF_KINDS, kinds=()), IN_GROUPS) for each in (fast, slow)
    ]
    for number in range(2):
        assert mixed.stages[number].forward_s == alone[number].stages[number].forward_s
        assert mixed.stages[number].update_s == alone[number].stages[number].update_s

    # All-reduces inside the second server take a tenth of the time.
    kinds = (KINDS[0], replace(KINDS[1], link_ratios=(10.0, 1.0)))
    both = profile_of_kinds({"one": fast, "two": fast})
    faster = given_plan.price(both, replace(OF_KINDS, kinds=kinds), IN_GROUPS)
    plain = given_plan.price(both, OF_KINDS, IN_GROUPS)
    saved_s = 0.9 * 4 * ring_all_reduce_s(2, 2, Link(100.0))
    assert plain.stages[0].forward_s == faster.stages[0].forward_s
    assert plain.stages[1].forward_s - faster.stages[1].forward_s == pytest.approx(saved_s)


def test_groups_lie_within_a_kind_and_have_one_size() -> None:
    both = profile_of_kinds({"one": divided(CHAIN, 2, 4), "two": divided(CHAIN, 2, 4)})
    uneven = tuple(replace(kind, count=count) for kind, count in zip(KINDS, (3, 5), strict=True))
    with pytest.raises(ClusterError, match="3 GPUs of one do not make whole groups of 2 ranks"):
        given_plan.price(both, replace(OF_KINDS, kinds=uneven), IN_GROUPS)
    slower = (KINDS[0], replace(KINDS[1], speed=0.5))
    with pytest.raises(ClusterError, match="groups of 2 ranks need GPUs as fast as"):
        given_plan.price(both, replace(OF_KINDS, kinds=slower), IN_GROUPS)
    first, last = IN_GROUPS.stages
    other = replace(IN_GROUPS, stages=(first, replace(last, replicas=1, tensor=4)))
    with pytest.raises(
        ClusterError, match="the groups of all stages have one size, and not 2, 4 ranks"
    ):
        given_plan.price(both, OF_KINDS, other)


def test_a_search_on_kinds_divides_layers_where_that_is_faster() -> None:
    """Weights so large that replicas exchange them for longer than groups do their sums."""
    heavy = profile(
        *(layer(name, 1.0, 2.0, output_bytes=1, weight_bytes=400) for name in "abcd")
    ).model_copy(update={"graph_hash": "0123", "optimizer_elementwise": True})
    both = profile_of_kinds({"one": divided(heavy, 2), "two": divided(heavy, 2)})
    how: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 2}
    found = solve(both, OF_KINDS, **how)
    undivided = solve(both, OF_KINDS, tensor=(1,), **how)
    assert found.divides_layers
    assert found.predicted.seconds_per_minibatch < undivided.predicted.seconds_per_minibatch
    check_trainable(found)


@pytest.mark.parametrize("level", [2, 3])
def test_groups_shard_weights_as_the_gpus_of_a_cluster_of_groups_do(level: int) -> None:
    """Four replicas of two ranks each, in two servers; each replica is a server's half."""
    model = divided(
        profile(*(layer(f"h.{n}", 1, 2, 8, weight_bytes=64, update_s=0.5) for n in range(4))), 2
    )
    cluster = hierarchical_cluster((4, 2), (16.0, 4.0))
    setting = Setting(cluster, find("1f1b-flush"), 8)
    problem = Problem(layer_costs_on(model, cluster), setting)
    layers = frozenset(range(4))
    stage = Candidate(frozenset(), layers, StageOptions(4, level, tensor=2))
    price = problem.price([stage])

    rank = profile_at(model, 2, Topology(cluster).group_link(2))
    alone = Problem(LayerCosts(rank), replace(setting, cluster=groups_of(cluster, 2)))
    expected = alone.price([replace(stage, options=StageOptions(4, level))])
    assert price.seconds_per_minibatch == pytest.approx(expected.seconds_per_minibatch)
    assert price.memory == expected.memory
    assert price.communication_bytes == pytest.approx(2 * expected.communication_bytes)

    plan = assemble(problem, Evaluation((stage,), price))
    assert plan.shards_divided_layers
    assert simulated_s(plan) == pytest.approx(price.seconds_per_minibatch)
    with pytest.raises(PlannerError, match="groups of 2 ranks shard"):
        check_base(plan)


def test_sharded_groups_fit_where_neither_fits_alone() -> None:
    """Eight layers with weights and gradients of 50 bytes each, and twice that of the optimizer.

    Four replicas that shard weights hold 1600 / 4 bytes, two layers' weights and twice the
    gradients of one: 600. Two ranks that divide layers, and two replicas the optimizer's state,
    hold 600, too. Both together hold 500.
    """
    layers = [layer(f"h.{n}", 1, 2, 8, weight_bytes=50) for n in range(8)]
    model = profile(*(replace(each, optimizer_bytes=100) for each in layers))
    model = replace(divided(model, 2), optimizer_elementwise=True)
    find_plan = partial(solve, schedule="1f1b-flush", microbatches=4, tensor=(1, 2), max_stages=1)
    cluster = flat_cluster(4, 1e6, 550)
    plan = find_plan(model, cluster)
    assert plan.shards_divided_layers
    assert plan.config == "2x2"
    exported = export(plan, "torchtitan")
    assert "tensor_parallel_degree=2" in exported
    assert "data_parallel_shard_degree=2" in exported

    measured = replace(model, provenance=replace(model.provenance, source="measured"))
    with pytest.raises(InfeasibleError):
        find_plan(measured, cluster)
