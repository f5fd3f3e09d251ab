"""Compressed messages: what they do to bytes on links, to the answer and to memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.formats.cluster import Cluster, CodecTime, flat_cluster, load_cluster, save_cluster
from planner.formats.names import CODECS, CodecName
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile, Value
from planner.simulator.simulate_plan import simulated_s
from planner.solver import search_plan as solve
from tests.samples import layer, profile

LINK = 1e6  # bytes per second


def model(element_bytes: int | None = None) -> Profile:
    """Four layers of a second and a half; 1 MB of float32 between them, and a mask of 1,000 bytes
    beside it.
    """
    layers = [layer(f"layer{number}", 0.5, 1.0, weight_bytes=10**8) for number in range(4)]
    value = Value(name="h", output_bytes=10**6, gradient_bytes=10**6, element_bytes=element_bytes)
    mask = Value(name="mask", output_bytes=1000, gradient_bytes=0)
    made = profile(*layers)
    passing = [each.model_copy(update={"outputs": (value, mask)}) for each in made.layers[:-1]]
    edges = [
        {"source": f"layer{number}", "value": name, "target": f"layer{number + 1}"}
        for number in range(3)
        for name in ("h", "mask")
    ]
    record = made.model_dump() | {"layers": (*passing, made.layers[-1]), "edges": edges}
    return Profile.model_validate(record)


def cluster(codec: CodecName) -> Cluster:
    return flat_cluster(2, LINK).model_copy(update={"compress": codec})


def solved(codec: CodecName, element_bytes: int | None = None) -> Plan:
    return solve(model(element_bytes), cluster(codec), schedule="1f1b-flush", microbatches=4)


@pytest.mark.parametrize(
    ("codec", "element_bytes", "coded_bytes"),
    [
        ("none", None, 1_000_000),
        ("bfloat16", None, 500_000),
        ("bfloat16", 2, 1_000_000),
        ("int8", None, 977 * 260),
        ("int8", 2, 1954 * 260),
        ("int8", 1, 1_000_000),
    ],
)
def test_links_carry_coded_bytes(
    codec: CodecName, element_bytes: int | None, coded_bytes: int
) -> None:
    """250,000 float32 are 977 blocks of 256; a mask travels as it is."""
    plan = solved(codec, element_bytes)
    assert plan.config == "1-1"
    (transfer,) = plan.transfers
    assert (transfer.output_bytes, transfer.gradient_bytes) == (coded_bytes + 1000, coded_bytes)
    sent = plan.predicted.communication_bytes_per_sample
    assert sent == pytest.approx((2 * coded_bytes + 1000) / (plan.microbatch_size or 0))


def test_plans_get_faster_and_are_counted_as_large() -> None:
    """Message buffers count as if nothing were coded: a decoded copy of a value is there, too."""
    plans = [solved(codec) for codec in CODECS]
    seconds = [plan.predicted.seconds_per_minibatch for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(CODECS)
    assert [simulated_s(plan) for plan in plans] == seconds
    assert len({stage.memory.communication_bytes for plan in plans for stage in plan.stages}) == 1


@pytest.mark.parametrize(
    ("schedule", "microbatches", "counted"), [("1f1b", 1, 1), ("2bw", 4, 4), ("1f1b-flush", 4, 3)]
)
def test_both_ends_take_their_time_to_code(schedule: str, microbatches: int, counted: int) -> None:
    """A byte takes 1 us at either end: with 2 x 255 kB a stage's processor takes half a second more
    per microbatch.
    """
    slow = cluster("int8").model_copy(
        update={"codec_times": (CodecTime(codec="int8", s_per_byte=1e-6),)}
    )
    plans = [
        solve(model(), each, schedule=schedule, microbatches=microbatches)
        for each in (cluster("int8"), slow)
    ]
    more_s = 1e-6 * sum(
        plans[1].transfers[0].model_dump(include={"output_bytes", "gradient_bytes"}).values()
    )
    quick, late = (plan.solver.cost_model_s or 0 for plan in plans)
    assert late - quick == pytest.approx(counted * more_s)
    seconds = [plan.predicted.seconds_per_minibatch for plan in plans]
    assert seconds[1] > seconds[0]
    assert simulated_s(plans[1]) == pytest.approx(seconds[1])


def test_files_say_it_where_something_is_coded(tmp_path: Path) -> None:
    for codec in CODECS:
        save_plan(solved(codec), tmp_path / "plan.json")
        save_cluster(cluster(codec), tmp_path / "cluster.json")
        assert load_plan(tmp_path / "plan.json").cluster.compress == codec
        assert load_cluster(tmp_path / "cluster.json").compress == codec
        assert ("compress" in (tmp_path / "plan.json").read_text("utf-8")) == (codec != "none")
