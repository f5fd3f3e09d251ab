"""What makes a plan valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.plan_parts import Stage, config_of, short_config
from planner.reporting.tables.plan import bottleneck_place, plan_report
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve
from tests.formats.test_profile import set_at
from tests.samples import layer, profile


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A 2-1 plan: the second layer holds all the weights, the first two thirds of the time."""
    model = profile(layer("a", 2, 4, output_bytes=1), layer("b", 1, 2, weight_bytes=1000))
    return solve(model, flat_cluster(3, 10.0))


def test_what_was_saved_is_loaded(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_plans_of_version_0_1_load_unless_they_are_for_the_max_load_objective(
    plan: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    content = json.loads(plan.model_dump_json())
    assert content["contiguous"] is True
    content["cluster"]["kinds"] = [{"count": 3, "speed": 1.0, "pays_transfers": True}]
    file.write_text(json.dumps(content))
    assert load_plan(file).contiguous
    places: list[tuple[list[str | int], object]] = [
        (["contiguous"], False),
        (["solver", "cost_model"], "max-load"),
        (["cluster", "kinds", 0, "pays_transfers"], False),
    ]
    for place, value in places:
        changed = json.loads(json.dumps(content))
        set_at(changed, place, value)
        file.write_text(json.dumps(changed))
        with pytest.raises(PlanError, match=f"{place[-1]} = {value!r}: Input should be "):
            load_plan(file)


def test_plans_with_names_that_are_gone_load(plan: Plan, tmp_path: Path) -> None:
    """A schedule of one minibatch at a time, and another cost model."""
    content = json.loads(plan.model_dump_json())
    content["schedule"] = "naive"
    content["solver"]["cost_model"] = "pipedream"
    content["predicted"]["bottleneck"]["resource"] = "boundary"
    for stage in content["stages"]:
        stage["in_flight"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(content))
    loaded = load_plan(tmp_path / "plan.json")
    assert (loaded.schedule, loaded.microbatches) == (FLUSH, 1)
    assert bottleneck_place(loaded.predicted.bottleneck).startswith("the transfer after stage")
    assert "limited by" in plan_report(loaded)


def test_properties(plan: Plan) -> None:
    assert plan.config == "2-1"
    assert plan.replicas == (2, 1)
    assert plan.workers == 3
    assert config_of((13, 2, 1)) == "13-2-1"
    assert config_of((8, 8, 8, 8), chunks=2) == "8-8 x2 chunks"
    assert short_config(config_of((1,) * 112, chunks=2)) == "56 x 1 x2 chunks (56 stages)"
    memory = plan.stages[1].memory
    assert (
        memory.total_bytes
        == memory.weights_bytes + memory.gradients_bytes + memory.communication_bytes
    )


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (["config"], "1-2", "config '1-2' contradicts the stages"),
        (["stages", 0, "ranks"], [0, 2], "are not 0 to 2, each once"),
        (["stages", 0, "layers"], ["a", "b"], "layer 'b' is in two stages"),
        (["stages", 0, "layers"], [], "stages[0].layers"),
        (["stages", 0, "in_flight"], 0, "stages[0].in_flight = 0"),
        (["cluster", "levels", 0, "size"], 2, "3 workers do not fit a cluster of 2 GPUs"),
        (["transfers", 0, "target"], 0, "transfer 0 -> 0 is not one from a stage to a later one"),
        (["microbatches"], 4, "schedule 1f1b has one microbatch per minibatch, not 4"),
        (["schedule"], "2bw", "schedule 2bw needs a microbatch for every replica of 2-1, not 1"),
        (["schedule"], "chimera", "schedule = 'chimera'"),
        (["predicted", "seconds_per_minibatch"], -1, "predicted.seconds_per_minibatch = -1"),
        (["schema_version"], 2, "schema_version 2, this version reads 1"),
        (["colour"], "red", "colour = 'red': unknown field"),
    ],
)
def test_wrong_content_is_named(
    plan: Plan, tmp_path: Path, place: list[str | int], value: object, complaint: str
) -> None:
    content = json.loads(plan.model_dump_json())
    set_at(content, place, value)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert complaint in caught.value.message
    assert "plan solve" in caught.value.hint


def test_a_transfer_occurs_once(plan: Plan, tmp_path: Path) -> None:
    content = json.loads(plan.model_dump_json())
    content["transfers"] *= 2
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="transfer 0 -> 1 is not one from a stage to a later one"):
        load_plan(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharded": True}, "two replicas or more"),
        ({"recompute": [["b"], ["b"]], "recompute_s": 1.0}, "each layer once"),
        ({"recompute": [["x"]], "recompute_s": 1.0}, "group of 'x' is no run"),
        ({"recompute": [["b"]]}, "recompute_s is missing"),
    ],
)
def test_options_that_make_no_sense_are_named(
    fields: dict[str, object], message: str, plan: Plan
) -> None:
    stage = plan.stages[-1]
    assert stage.replicas == 1
    content = json.loads(stage.model_dump_json())
    assert "sharded" not in content  # as in files of earlier versions
    with pytest.raises(ValueError, match=message):
        Stage.model_validate(content | fields)
