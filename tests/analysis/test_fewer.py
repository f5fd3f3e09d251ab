"""Plans for fewer hosts beside a plan: those that solving for what is left would find."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.analysis.fewer import cost_of_loss
from planner.errors import ClusterError, PlanError
from planner.formats.cluster import DeviceKind
from planner.formats.plan import Plan
from planner.reporting.tables.plan import plan_report
from tests.samples import layer, profile

MODEL = profile(*(layer(name, 1, 2, output_bytes=100, weight_bytes=1000) for name in "abcdef"))


def test_each_smaller_plan_is_that_of_the_smaller_cluster(tmp_path: Path) -> None:
    plan = planner.solve(MODEL, planner.flat_cluster(4, 1e3), schedule="1f1b-flush", survive=2)
    assert [left.cluster.gpus for left in plan.smaller] == [3, 2]
    for left in plan.smaller:
        alone = planner.solve(
            MODEL,
            planner.flat_cluster(left.cluster.gpus, 1e3),
            schedule="1f1b-flush",
            microbatches=plan.microbatches,
        )
        assert left.stages == alone.stages
        assert left.predicted.seconds_per_minibatch == alone.predicted.seconds_per_minibatch
        assert left.minibatch_size == plan.minibatch_size
        assert plan.on_gpus(left.cluster.gpus) == left
    share = plan.predicted.seconds_per_minibatch / plan.smaller[0].predicted.seconds_per_minibatch
    assert f"3 of 4 GPUs: {share:.0%} of the speed ({plan.smaller[0].config})" in plan_report(plan)
    plan.save(tmp_path / "plan.json")
    assert planner.load_plan(tmp_path / "plan.json") == plan
    with pytest.raises(PlanError, match="a run that may have 1 GPU needs a plan for them"):
        plan.on_gpus(1)


def test_a_plan_without_smaller_ones_is_written_as_before() -> None:
    plan = planner.solve(MODEL, planner.flat_cluster(3, 1e3))
    assert "smaller" not in json.loads(plan.model_dump_json())


def test_whole_servers_are_lost() -> None:
    cluster = planner.hierarchical_cluster((2, 3), (1e5, 1e3))
    plan = planner.solve(MODEL, cluster, schedule="1f1b-flush", survive=2)
    assert [[level.size for level in left.cluster.levels] for left in plan.smaller] == [
        [2, 2],
        [2, 1],
    ]


def test_what_cannot_be_survived_is_noted() -> None:
    held = planner.solve(MODEL, planner.flat_cluster(3, 1e3), schedule="1f1b-flush", microbatches=4)
    memory = max(map(held.memory_bytes, range(len(held.stages))))
    plan = planner.solve(
        MODEL,
        planner.flat_cluster(3, 1e3, memory),
        schedule="1f1b-flush",
        microbatches=4,
        survive=2,
    )
    assert len(plan.smaller) < 2
    assert any(
        note.startswith("The loss of ") and "cannot be survived" in note for note in plan.notes
    )


def test_where_it_depends_on_the_host_there_is_no_answer() -> None:
    kinds = (DeviceKind(count=1, speed=1.0), DeviceKind(count=1, speed=2.0))
    mixed = planner.flat_cluster(2, 1e3).model_copy(update={"kinds": kinds})
    for cluster, what in (
        (mixed, "of several kinds"),
        (planner.hierarchical_cluster((2, 2, 2), (1e5, 1e4, 1e3)), "on 3 levels"),
    ):
        with pytest.raises(ClusterError, match=f"which GPUs {what} are left"):
            planner.solve(MODEL, cluster, survive=1)
    with pytest.raises(ClusterError, match="of 2 hosts not 2 can be lost"):
        planner.solve(MODEL, planner.flat_cluster(2, 1e3), survive=2)


def test_only_plans_of_the_same_minibatches_go_together() -> None:
    plan = planner.solve(MODEL, planner.flat_cluster(3, 1e3), schedule="1f1b-flush", survive=1)
    content = json.loads(plan.model_dump_json())
    content["smaller"][0]["microbatches"] += 1
    with pytest.raises(
        ValueError, match="is no smaller plan of the same model, schedule and minibatch"
    ):
        type(plan).model_validate_json(json.dumps(content))


def lone_stages(gpus: int) -> Plan:
    return planner.price(
        MODEL, planner.flat_cluster(gpus, 1e3), gpus, schedule="1f1b-flush", microbatches=4
    )


def test_the_cost_of_losing_a_lone_stage() -> None:
    """Hosts hold stages 0 and 2, 1 and 0, 2 and 1; stages of three layers then each need two of
    them.
    """
    plan = lone_stages(3).model_copy(update={"smaller": (lone_stages(2),)})
    memory = plan.stages[0].memory
    stage = memory.weights_bytes + memory.optimizer_bytes
    cost = cost_of_loss(plan)
    assert cost.memory_bytes == 2 * 2 * stage
    assert cost.copy_s == stage / 1e3
    # Without host 0 the others have what they need. Without host 2, hosts 0 and 1 lack stages 1 and
    # 2.
    assert cost.restore_s == stage / 1e3
    assert "a loss" in plan_report(plan)


def test_what_a_replica_has_is_not_sent() -> None:
    how: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 4}
    cluster = planner.flat_cluster(4, 1e3)
    plan = planner.price(MODEL, cluster, 2, replicas=2, **how)
    stages = [stage.memory.weights_bytes + stage.memory.optimizer_bytes for stage in plan.stages]
    same_cut = planner.price(MODEL, planner.flat_cluster(3, 1e3), 2, replicas=[2, 1], **how)
    cost = cost_of_loss(plan.model_copy(update={"smaller": (same_cut,)}))
    assert (cost.copy_s, cost.memory_bytes) == (0.0, 2 * max(stages))
    # Host 2 becomes the second replica of stage 0 when one of that is lost: the other one sends it.
    assert cost.restore_s == stages[0] / 1e3
    whole = planner.price(MODEL, cluster, 1, replicas=4, **how)
    one_less = planner.price(MODEL, planner.flat_cluster(3, 1e3), 1, replicas=3, **how)
    cost = cost_of_loss(whole.model_copy(update={"smaller": (one_less,)}))
    assert (cost.copy_s, cost.restore_s) == (0.0, 0.0)


def test_a_plan_on_one_host_has_no_copy_elsewhere() -> None:
    how: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 4}
    alone = planner.price(MODEL, planner.flat_cluster(2, 1e3), 1, replicas=1, **how)
    plan = alone.model_copy(update={"smaller": (lone_stages(1),)})
    assert cost_of_loss(plan).restore_s == math.inf
    assert "from its newest checkpoint" in plan_report(plan)
