"""Plans and profiles as tables."""

from __future__ import annotations

import pytest

from planner.formats.cluster import flat_cluster
from planner.formats.plan_parts import ALONG_ORDER, SolverReport
from planner.formats.profile import Device
from planner.reporting.tables.plan import bound_words, layer_range, plan_report, which_plans
from planner.reporting.tables.profile import profile_report
from planner.solver import search_plan as solve
from planner.units import format_bytes
from tests.samples import layer, profile

MODEL = profile(
    layer("a", 2, 4, output_bytes=1000),
    layer("b", 0.5, 1, output_bytes=10),
    layer("c", 0.5, 1, weight_bytes=10**6),
)


def test_a_plan_shows_its_stages_and_its_prediction() -> None:
    text = plan_report(solve(MODEL, flat_cluster(3, 1e4, 10**9, 1e-3)))
    for part in (
        "2-1 on 3 GPUs",
        "b .. c (2)",
        "0-1",
        "limited by",
        "samples/s, ",
        "simulated",
    ):
        assert part in text
    assert "less than data parallel" in text
    assert "1 GB each" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_plan_that_leaves_gpus_says_why() -> None:
    text = plan_report(solve(profile(layer("a", 1, 2, weight_bytes=10**6)), flat_cluster(8, 1.0)))
    assert "7 of 8 GPUs would not make it faster" in text


def test_layer_ranges() -> None:
    assert layer_range(("only",)) == "only"
    assert layer_range(("first", "second", "third")) == "first .. third (3)"


def test_a_profile_shows_layers_and_sums() -> None:
    text = profile_report(MODEL)
    assert "sum of layers 9 s: forward 3 s, backward 6 s, update 0 s" in " ".join(text.split())
    assert "4 samples of float32" in text
    assert len(text.splitlines()) > len(MODEL.layers)


def test_gradient_accumulation_is_shown_where_it_takes_time() -> None:
    assert "accumulation" not in profile_report(MODEL)
    layers = tuple(each.model_copy(update={"accumulate_s": 0.25}) for each in MODEL.layers)
    adding = MODEL.model_copy(update={"layers": layers})
    text = profile_report(adding)
    assert "750 ms more per microbatch that accumulates gradients" in text
    assert "accumulation" in text
    cluster = flat_cluster(2, 1e4)
    divided = plan_report(solve(adding, cluster, schedule="gpipe", microbatches=4))
    assert "accumulation" in divided
    assert "accumulation" not in plan_report(solve(adding, cluster))


def test_what_recomputes_and_is_sharded_is_said_where_anything_is() -> None:
    plan = solve(MODEL, flat_cluster(3, 1e4), recompute="never", shard_optimizer="never")
    assert "recomputes" not in plan_report(plan)
    first, second = plan.stages
    options = {"sharded": True, "recompute": (first.layers[:1],), "recompute_s": 1.0}
    changed = plan.model_copy(update={"stages": (first.model_copy(update=options), second)})
    rows = plan_report(changed).splitlines()
    assert any(row.split()[-3:] == ["1/2", "1", "layer"] for row in rows)
    assert any(row.split()[-2:] == ["whole", "nothing"] for row in rows)
    again = first.model_copy(update={"recompute": (second.layers,)})
    assert again.recomputation_words == "1 block, 2 layers"
    assert first.model_copy(update={"recompute": True}).recomputation_words == "all layers"
    assert first.recomputation_words == ""


def test_overheads_of_a_gpu_are_shown_where_there_are_any() -> None:
    cluster = flat_cluster(2, 1e4)
    assert "overhead" not in plan_report(solve(MODEL, cluster))
    gpu = MODEL.model_copy(
        update={"device": Device(kind="cuda", name="imagined", context_bytes=400 * 10**6)}
    )
    plan = solve(gpu, cluster)
    text = plan_report(plan)
    assert "overhead" in text
    assert format_bytes(plan.stages[0].memory.overhead_bytes) in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("cuts", "bound_of", "words"),
    [
        ("", "", " in the profile's order"),
        ("", "cuts between blocks", " in the profile's order and with cuts between blocks"),
        ("all 9 sets of layers that a cut may leave before it", "", ""),
        (f"{ALONG_ORDER}, improved", ALONG_ORDER, " in the profile's order"),
        (
            "some",
            f"cuts between blocks, {ALONG_ORDER}",
            " in the profile's order and with cuts between blocks",
        ),
        (f"{ALONG_ORDER}, improved", "", ""),
    ],
)
def test_a_bound_says_which_plans_it_is_of(cuts: str, bound_of: str, words: str) -> None:
    solver = SolverReport(
        name="search",
        status="feasible",
        lower_bound_s=1.0,
        bound_of=bound_of,
        cuts=cuts,
        gap=0.5,
        seconds=0.0,
    )
    assert which_plans(solver) == words
    assert bound_words(solver).startswith(f"no plan{words} takes less than 1")
