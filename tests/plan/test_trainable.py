"""Plans that `price` gives are plans that `train` would start: the same checks refuse them."""

from typing import Any

import pytest

import planner
from planner.errors import InputError, PlanError, PlannerError
from planner.executor.run.agreement import check_schedule
from planner.formats.profile import Compiled, LossMean, Profile
from planner.plan.trainable import check_trainable
from tests.samples import layer, profile

SCHEDULES = ("1f1b", "2bw", "1f1b-flush", "gpipe", "interleaved", "zb-h1")


def of_a_model(**changes: Any) -> Profile:
    given = {"graph_hash": "0" * 64, "optimizer_elementwise": True, **changes}
    layers = (layer(f"layer{number}", output_bytes=1000, weight_bytes=1000) for number in range(8))
    return profile(*layers).model_copy(update=given)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whatever_is_priced_can_start(schedule: str) -> None:
    priced = 0
    for stages, replicas in (
        (1, 1),
        (1, 4),
        (2, 1),
        (2, 2),
        (4, 1),
        (2, [3, 1]),
        (2, [1, 3]),
        (4, [1, 1, 2, 1]),
    ):
        for microbatches in (None, 1, 2, 3, 4, 8):
            cluster = planner.flat_cluster(8, "10Gbps")
            how: dict[str, Any] = {
                "schedule": schedule,
                "replicas": replicas,
                "microbatches": microbatches,
            }
            try:
                plan = planner.price(of_a_model(), cluster, stages, **how)
            except PlannerError:
                continue
            check_trainable(plan)
            check_schedule(plan)
            priced += 1

    assert priced > 5


def through_the_compiler() -> Profile:
    return of_a_model(
        compiled=Compiled(
            runs=(),
            runs_forward_s=8.0,
            runs_backward_s=16.0,
            uncompiled_forward_s=8.0,
            uncompiled_backward_s=16.0,
        )
    )


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "v-half"])
def test_compiled_stages_have_no_schedule_that_splits_their_backward(schedule: str) -> None:
    cluster = planner.flat_cluster(4, "10Gbps")
    why = f"under {schedule} the gradients of weights are computed after those of inputs"
    with pytest.raises(InputError, match=why) as refused:
        planner.solve(through_the_compiler(), cluster, schedule=schedule)
    assert "`schedule=1f1b-flush`" in refused.value.hint
    with pytest.raises(PlanError, match=why):
        planner.price(through_the_compiler(), cluster, 4, schedule=schedule)


def test_a_compiled_stage_that_is_alone_has_nothing_to_split() -> None:
    cluster = planner.flat_cluster(4, "10Gbps")
    plan = planner.solve(through_the_compiler(), cluster, schedule="zb-h1", max_stages=1)
    check_trainable(plan)


def test_other_schedules_are_sought_for_compiled_stages() -> None:
    cluster = planner.flat_cluster(2, "10Gbps")
    plan = planner.solve(through_the_compiler(), cluster, schedule="auto", minibatch=4)
    assert plan.compiled
    check_trainable(plan)
    rows = planner.compare_schedules(through_the_compiler(), cluster, microbatches=[4])
    told = {str(row.schedule): row.config for row in rows.rows}
    assert told["1f1b-flush"]
    assert told["zb-h1"] is None


def test_a_loss_of_whole_batches_is_not_divided_unless_that_is_accepted() -> None:
    contrastive = of_a_model(loss=LossMean(over="batch"))
    cluster = planner.flat_cluster(2, "10Gbps")
    how: dict[str, Any] = {"schedule": "1f1b-flush", "replicas": 1}

    with pytest.raises(InputError, match="is not a mean over samples"):
        planner.price(contrastive, cluster, 2, **how, microbatches=2)

    accepted = planner.price(
        contrastive, cluster, 2, **how, microbatches=2, accept_divided_loss=True
    )
    assert accepted.loss is not None
    assert accepted.loss.accepted
    assert planner.price(contrastive, cluster, 2, **how, microbatches=1).microbatches == 1


def test_an_optimizer_that_combines_elements_is_not_sharded() -> None:
    cluster = planner.flat_cluster(2, "10Gbps")

    with pytest.raises(InputError, match="replicas cannot shard"):
        planner.price(
            of_a_model(optimizer_elementwise=False), cluster, 1, replicas=2, shard_optimizer="all"
        )


def test_a_profile_without_a_model_is_priced_whatever_it_is() -> None:
    imported = of_a_model(graph_hash=None, optimizer_elementwise=None, loss=LossMean(over="batch"))

    plan = planner.price(
        imported, planner.flat_cluster(2, "10Gbps"), 2, replicas=1, schedule="gpipe", microbatches=2
    )

    assert plan.microbatches == 2
