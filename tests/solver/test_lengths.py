"""Plans for lengths that vary: the best expected time among all plans, with memory for the
longest.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.formats.cluster import flat_cluster
from planner.formats.plan import load_plan
from planner.formats.profile import Profile
from tests.lengths import LINEAR, QUADRATIC, varying_profile
from tests.samples import layer

# Mostly short, a few long.
SAMPLES = [min(100, 3 + int(random.Random(number).expovariate(1 / 14))) for number in range(600)]
CLUSTER = flat_cluster(2, 1e9, latency_s=1e-5)


def chain(count: int = 8, order: str = "random") -> Profile:
    """Half of the layers are quadratic, and the longer at the greatest length."""
    layers = [
        layer(f"l{n}", 1e-3, 2e-3, output_bytes=10**5, weight_bytes=10**6, saved_bytes=10**7)
        for n in range(count // 2)
    ]
    layers += [
        layer(f"l{n}", 3e-3, 6e-3, output_bytes=10**5, weight_bytes=10**6, saved_bytes=10**7)
        for n in range(count // 2, count)
    ]
    layers[-1] = layers[-1].model_copy(update={"outputs": ()})
    shares = [LINEAR] * (count // 2) + [QUADRATIC] * (count - count // 2)
    return varying_profile(layers, shares, SAMPLES, order, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["random", "buckets"])
def test_the_plan_is_the_best_of_all_cuts_by_its_expected_time(order: str) -> None:
    profile = chain(order=order)
    options: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 4}
    plan = planner.solve(
        profile,
        CLUSTER,
        max_stages=2,
        tensor=(1,),
        shard_optimizer="never",
        recompute="never",
        **options,
    )
    layers = [each.name for each in profile.layers]
    ways = {
        after: planner.price(profile, CLUSTER, [layers[after - 1]], replicas=1, **options)
        for after in range(1, 8)
    }
    parallel = planner.price(profile, CLUSTER, 1, replicas=2, **options)
    best = min((*ways.values(), parallel), key=lambda way: way.predicted.seconds_per_minibatch)
    assert plan.predicted.seconds_per_minibatch == pytest.approx(
        best.predicted.seconds_per_minibatch, rel=1e-3
    )


def test_a_plan_for_the_longest_alone_is_another_one_and_slower() -> None:
    profile = chain()
    options: dict[str, Any] = {"schedule": "1f1b", "max_stages": 2, "tensor": (1,)}
    slow = flat_cluster(2, 1e7)
    plan = planner.solve(profile, slow, **options)
    fixed = planner.solve(profile.model_copy(update={"lengths": None}), slow, **options)
    assert plan.config == fixed.config == "1-1"
    assert len(plan.stages[0].layers) < len(fixed.stages[0].layers)
    there = planner.price(profile, slow, [fixed.stages[0].layers[-1]], replicas=1, schedule="1f1b")
    assert there.predicted.seconds_per_minibatch > 1.1 * plan.predicted.seconds_per_minibatch


def test_memory_is_that_of_the_longest() -> None:
    profile = chain()
    fixed = profile.model_copy(update={"lengths": None})
    for schedule in ("1f1b", "1f1b-flush"):
        own, other = (
            planner.price(each, CLUSTER, ["l3"], replicas=1, schedule=schedule)
            for each in (profile, fixed)
        )
        assert [stage.memory for stage in own.stages] == [stage.memory for stage in other.stages]
        assert own.predicted.seconds_per_minibatch < other.predicted.seconds_per_minibatch


def test_the_plan_says_for_which_lengths_it_was_made(tmp_path: Path) -> None:
    plan = planner.solve(chain(order="buckets"), CLUSTER, schedule="1f1b-flush", microbatches=4)
    assert "words 1 to 100, " in str(plan)
    assert "in buckets; memory for the greatest" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert planner.simulate(plan, minibatches=3).minibatches == 3
    fixed = planner.solve(chain().model_copy(update={"lengths": None}), CLUSTER)
    assert "lengths" not in fixed.model_dump()
    assert "forward_shares" not in fixed.stages[0].model_dump()


def test_a_comparison_says_what_other_batches_cost() -> None:
    profile = chain()
    plan = planner.solve(profile, CLUSTER, schedule="1f1b-flush", microbatches=4)
    rows = {row.name: row for row in planner.compare(profile, plan).rows}
    assert "in random order" not in rows  # it is the chosen plan
    order = ["packed", "in buckets", "chosen plan", "padded to the longest"]
    seconds = [rows[name].seconds_per_microbatch for name in order]
    assert seconds == sorted(seconds)
    fixed = profile.model_copy(update={"lengths": None})
    ends = [stage.layers[-1] for stage in plan.stages[:-1]] or 1
    padded = planner.price(
        fixed,
        CLUSTER,
        ends,
        replicas=list(plan.replicas),
        schedule="1f1b-flush",
        microbatches=4,
        shard_optimizer=[n for n, stage in enumerate(plan.stages) if stage.sharded] or False,
    )
    assert rows["padded to the longest"].seconds_per_microbatch == pytest.approx(
        padded.predicted.seconds_per_minibatch / 4, rel=1e-6
    )
    share = sum(SAMPLES) / len(SAMPLES) / 100
    assert seconds[0] == pytest.approx(share * seconds[3])
    assert "packed" not in str(planner.compare(fixed, planner.solve(fixed, CLUSTER)))


def test_data_parallelism_waits_for_the_longest_of_its_replicas() -> None:
    profile = varying_profile(
        [layer("only", 1.0, 2.0, weight_bytes=1)], [LINEAR], [1, 100], "given"
    )
    plan = planner.price(profile, flat_cluster(2, 1e12), 1, replicas=1, schedule="1f1b")
    alone = 3 * (0.25 + 0.75 * 0.505)
    assert plan.predicted.seconds_per_minibatch == pytest.approx(alone, rel=1e-3)
    # Two replicas take as long as the longest of two, which is always 100.
    assert plan.predicted.speedup_over_data_parallel == pytest.approx(1.5 / alone, rel=1e-3)
