"""Plans of repeated blocks are cut between blocks, and inside them only where that pays."""

from __future__ import annotations

import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import Granularity
from planner.plan.blocks import block_ends
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.find_plan import BETWEEN
from planner.solver.problem.drained import drained_s
from planner.solver.problem.problem import Problem
from planner.solver.tuning.record import STANDARD
from tests.plan.test_blocks import transformer

MODEL = transformer(6, "h.{block}.part{part}")


def solved(model: Profile, gpus: int, granularity: Granularity, schedule: str = "1f1b") -> Plan:
    microbatches = 8 if find(schedule).divides else 1
    return solve(
        model,
        flat_cluster(gpus, 1e3),
        schedule=schedule,
        microbatches=microbatches,
        granularity=granularity,
    )


def cuts(plan: Plan, model: Profile) -> set[int]:
    """Return the positions of the layers after which the plan cuts."""
    position = {layer.name: number for number, layer in enumerate(model.layers)}
    return {position[stage.layers[-1]] for stage in plan.stages[:-1]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "gpipe", "zb-h1", "interleaved"])
@pytest.mark.parametrize("gpus", [2, 4, 7])
def test_blocks_are_whole_unless_cutting_them_pays(schedule: str, gpus: int) -> None:
    block, auto, layer = (
        solved(MODEL, gpus, each, schedule) for each in ("block", "auto", "layer")
    )
    assert cuts(block, MODEL) <= block_ends(MODEL)
    inside = not cuts(auto, MODEL) <= block_ends(MODEL)
    seconds = auto.predicted.seconds_per_minibatch
    block_s, layer_s = block.predicted.seconds_per_minibatch, layer.predicted.seconds_per_minibatch
    saving = STANDARD.answer.min_saving_share
    assert seconds <= layer_s / (1 - saving) * (1 + 1e-9)
    assert seconds < block_s * (1 - saving) if inside else seconds == pytest.approx(block_s)
    # What the plan says of itself holds for all cuts.
    assert auto.solver.lower_bound_s <= layer_s * (1 + 1e-9)


def test_a_model_without_blocks_has_the_same_answer() -> None:
    model = transformer(3, "h.{block}.part{part}")
    assert cuts(solved(model, 4, "auto"), model) == cuts(solved(model, 4, "layer"), model)
    with pytest.raises(InputError, match="has none"):
        solved(model, 4, "block")


def test_bound_of_many_layers_says_that_it_is_of_cuts_between_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformer(50, "h.{block}.part{part}")
    sizes = {"weight_bytes": 10**6, "gradient_bytes": 10**6}  # too much for replicas to exchange
    model = model.model_copy(
        update={"layers": tuple(each.model_copy(update=sizes) for each in model.layers)}
    )
    # no cut inside a block is tried
    monkeypatch.setattr("planner.solver.find_plan._beside", lambda *_: frozenset())
    cluster = flat_cluster(8, 1e3)
    plan = solve(model, cluster, schedule="1f1b-flush", microbatches=16)
    assert len(model.layers) > STANDARD.answer.most_limited_cuts
    assert plan.solver.bound_of == BETWEEN
    problem = Problem(LayerCosts(model), Setting(cluster, FLUSH, 16))
    assert drained_s(problem) <= plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch
    assert Plan.model_validate_json(plan.model_dump_json()).solver == plan.solver
    few = solve(
        transformer(8, "h.{block}.part{part}"), cluster, schedule="1f1b-flush", microbatches=16
    )
    assert few.solver.bound_of == ""
    assert "bound_of" not in few.model_dump()["solver"]
