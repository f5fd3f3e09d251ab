"""Plans that were edited are refused by the first difference from the model, or are the same plan.

A plan is drawn, something in its file is changed, and whatever still loads is compared with the
model. What is accepted must name the same layers and values as before: other fields do not say what
is computed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from planner.analysis.given_plan import GivenPlan
from planner.errors import PlanError
from planner.formats.plan import Plan
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value
from planner.plan.same_model import check_same_model, expected_transfers
from planner.solver.clock import Clock
from tests.executor.plans import make_plan

DRAWS = 400
Content = dict[str, Any]


def profile_of(layers: int, skips: list[tuple[int, int]]) -> Profile:
    """A chain with some values that later layers use, too."""
    names = [f"layers.{number}" for number in range(layers)]
    pairs = sorted({*zip(range(layers), range(1, layers), strict=False), *skips})
    return Profile(
        model="drawn",
        graph_hash="0123",
        device=Device(kind="cpu", name="any", threads=1),
        microbatch_size=4,
        layers=tuple(
            Layer(
                name=name,
                op="Linear",
                forward_s=1e-3,
                backward_s=2e-3,
                update_s=1e-4,
                outputs=(Value(name=f"value_{number}", output_bytes=40, gradient_bytes=40),),
                weight_bytes=16,
                gradient_bytes=16,
            )
            for number, name in enumerate(names)
        ),
        edges=tuple(
            Edge(source=names[one], value=f"value_{one}", target=names[other])
            for one, other in pairs
        ),
        provenance=Provenance(tool="test", source="estimated"),
    )


def drawn(draw: random.Random) -> tuple[Profile, Plan]:
    layers = draw.randint(4, 9)
    ends = [sorted(draw.sample(range(layers), 2)) for _ in range(draw.randint(0, 4))]
    profile = profile_of(layers, [(one, other) for one, other in ends])
    replicas = draw.choice([(1, 1), (1, 1, 1), (2, 1), (1, 2, 1), (1, 1, 1, 1)])
    return profile, make_plan(profile, replicas, "1f1b-flush", 4)


def check(plan: Plan, profile: Profile) -> None:
    check_same_model(plan, [layer.name for layer in profile.layers], profile.edges)


def drop_layer(content: Content, draw: random.Random) -> None:
    stage = draw.choice(content["stages"])
    stage["layers"].pop(draw.randrange(len(stage["layers"])))


def double_layer(content: Content, draw: random.Random) -> None:
    layers = draw.choice(content["stages"])["layers"]
    draw.choice(content["stages"])["layers"].append(draw.choice(layers))


def swap_layers(content: Content, draw: random.Random) -> None:
    places = [
        (stage["layers"], index)
        for stage in content["stages"]
        for index in range(len(stage["layers"]))
    ]
    (one, first), (other, second) = draw.sample(places, 2)
    one[first], other[second] = other[second], one[first]


def swap_stages(content: Content, draw: random.Random) -> None:
    one, other = draw.sample(content["stages"], 2)
    one["layers"], other["layers"] = other["layers"], one["layers"]


def rename_layer(content: Content, draw: random.Random) -> None:
    layers = draw.choice(content["stages"])["layers"]
    layers[draw.randrange(len(layers))] += "_"


def move_layer(content: Content, draw: random.Random) -> None:
    """The cut is elsewhere, and the transfers are those of the old one."""
    before, after = draw.choice(list(zip(content["stages"], content["stages"][1:], strict=False)))
    after["layers"].insert(0, before["layers"].pop())


def drop_transfer(content: Content, draw: random.Random) -> None:
    content["transfers"].pop(draw.randrange(len(content["transfers"])))


def change_value(content: Content, draw: random.Random) -> None:
    values = draw.choice(content["transfers"])["values"]
    values[draw.randrange(len(values))] = f"value_{draw.randrange(9)}"


def add_value(content: Content, draw: random.Random) -> None:
    draw.choice(content["transfers"])["values"].append(f"value_{draw.randrange(9)}")


def redirect(content: Content, draw: random.Random) -> None:
    draw.choice(content["transfers"])[draw.choice(["source", "target"])] = draw.randrange(-1, 5)


def change_number(content: Content, draw: random.Random) -> None:
    """Fields that do not say what is computed, or of which some values are refused on load."""
    stage, transfer = draw.choice(content["stages"]), draw.choice(content["transfers"])
    fields = [
        (stage, "forward_s"),
        (stage, "in_flight"),
        (transfer, "output_bytes"),
        (transfer, "gradient_bytes"),
        (content, "microbatches"),
        (content, "microbatch_size"),
    ]
    record, name = draw.choice(fields)
    record[name] = draw.choice([0, -1, 1, 7, "x", None])


def change_ranks(content: Content, draw: random.Random) -> None:
    stage = draw.choice(content["stages"])
    stage["ranks"] = draw.choice([[], [0], [0, 0], [7], [1, 2, 3], [-1]])


CHANGES: list[Callable[[Content, random.Random], None]] = [
    drop_layer,
    double_layer,
    swap_layers,
    swap_stages,
    rename_layer,
    move_layer,
    drop_transfer,
    change_value,
    add_value,
    redirect,
    change_number,
    change_ranks,
]


def computed(plan: Plan) -> tuple[object, ...]:
    """What of a plan says what its stages compute and exchange."""
    stages = tuple(stage.layers for stage in plan.stages)
    transfers = {(each.source, each.target): tuple(sorted(each.values)) for each in plan.transfers}
    return stages, tuple(sorted(transfers.items(), key=lambda item: item[0]))


def test_edited_plans_are_refused_or_the_same() -> None:
    # refused on load, by the model, and accepted
    outcomes = {change.__name__: [0, 0, 0] for change in CHANGES}
    for seed in range(DRAWS):
        draw = random.Random(seed)
        profile, plan = drawn(draw)
        check(plan, profile)
        content = json.loads(plan.model_dump_json())
        change = CHANGES[seed % len(CHANGES)]
        change(content, draw)
        counts = outcomes[change.__name__]
        try:
            edited = Plan.model_validate(content)
        except ValidationError:
            counts[0] += 1
            continue
        if computed(edited) == computed(plan):
            check(edited, profile)
            counts[2] += 1
            continue
        with pytest.raises(PlanError, match="the plan is not one of the model 'drawn': "):
            check(edited, profile)
        counts[1] += 1
    for name in (
        "drop_layer",
        "swap_layers",
        "swap_stages",
        "rename_layer",
        "move_layer",
        "drop_transfer",
    ):
        assert outcomes[name][1] > DRAWS // len(CHANGES) // 2, outcomes
    assert outcomes["change_number"][2], outcomes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stages: stages[-1].pop(), "no stage has the layer 'layers.5'"),
        (
            lambda stages: stages[0].pop(0),
            "it has the layer 'layers.1' where the model has 'layers.0'",
        ),
        (
            lambda stages: stages[-1].append("more"),
            "goes on with 'more' behind the model's last layer",
        ),
        (
            lambda stages: stages[0].reverse(),
            "it has the layer 'layers.2' where the model has 'layers.0'",
        ),
        (
            lambda stages: stages[1].insert(0, stages[0].pop()),
            "it does not send the value 'value_1' from stage 0 to 1",
        ),
    ],
)
def test_the_first_difference_is_named(
    change: Callable[[list[list[str]]], object], message: str
) -> None:
    profile = profile_of(6, [])
    plan = make_plan(profile, (1, 1), "1f1b-flush")
    content = json.loads(plan.model_dump_json())
    change([stage["layers"] for stage in content["stages"]])
    edited = Plan.model_validate(content)
    with pytest.raises(PlanError) as error:
        check(edited, profile)
    assert message.replace("to 1", "to stage 1") in error.value.message
    with pytest.raises(PlanError):  # as explanations and reports beside a profile do
        GivenPlan.of(profile, edited, Clock())


def test_a_value_passes_through_its_users() -> None:
    profile = profile_of(6, [(0, 3), (0, 5)])
    stages = [["layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4"], ["layers.5"]]
    assert expected_transfers(stages, profile.edges) == {
        (0, 1): ["value_0", "value_1"],
        (1, 2): ["value_3"],
        (1, 3): ["value_0"],
        (2, 3): ["value_4"],
    }


def test_older_plans_may_send_what_stages_make_themselves() -> None:
    profile = profile_of(6, [])
    plan = make_plan(profile, (1, 1), "1f1b-flush")
    sent = plan.transfers[0].model_copy(update={"values": ("mask", *plan.transfers[0].values)})
    older = plan.model_copy(update={"transfers": (sent,)})
    names = [layer.name for layer in profile.layers]
    check_same_model(older, names, profile.edges, {"mask"})
    with pytest.raises(PlanError, match="it sends a value 'mask' from stage 0 to stage 1"):
        check_same_model(older, names, profile.edges)
