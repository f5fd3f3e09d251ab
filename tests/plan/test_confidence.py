"""Intervals of estimated answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.formats.cluster import flat_cluster, hierarchical_cluster
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.files import replace
from planner.formats.profile import Device
from planner.plan import confidence
from planner.plan.confidence import (
    ALL,
    Interval,
    Kind,
    Links,
    Network,
    interval_of,
    interval_of_kind,
    network_of,
)
from planner.profiler.estimated.devices import DEVICES
from tests.samples import layer, profile

TABLE = json.loads((Path(confidence.__file__).with_name("judged_errors.json")).read_text("utf-8"))


def test_equal_speeds() -> None:
    """Of a plan at 100 between 90 and 110, another at 96.4 covers 0.8: 90 to 106."""
    interval = Interval(0.9, 1.1)
    slower = interval.equal_speed(0.8)
    assert slower * interval.most - interval.least == pytest.approx(0.8 * 0.2)
    assert interval.equal_speed(1.0) == 1.0
    assert Interval(1.0, 1.0).equal_speed(0.5) == 1.0


def test_measured_profiles_have_none() -> None:
    model = profile(layer("a"), layer("b"))
    cluster = flat_cluster(2, "10Gbps")
    gpu = model.model_copy(update={"device": Device(kind="cuda", name="mine")})
    assert interval_of(model, cluster, divided=False, replicated=True) is None  # of a CPU
    assert interval_of(gpu, cluster, divided=False, replicated=True) is not None
    provenance = gpu.provenance.model_copy(update={"source": "measured"})
    measured = gpu.model_copy(update={"provenance": provenance})
    assert interval_of(measured, cluster, divided=False, replicated=True) is None


@pytest.mark.parametrize("links", ["known", "data sheet"])
@pytest.mark.parametrize("network", ["one server", "fast", "slow"])
@pytest.mark.parametrize("divided", [False, True])
def test_every_kind_has_one(links: Links, network: Network, divided: bool) -> None:
    for gpu in ("", *(spec.name for spec in DEVICES.values())):
        interval = interval_of_kind(Kind(gpu, links, network, divided, not divided))
        assert 0 < interval.least < interval.most


def test_wider_kinds_come_one_by_one() -> None:
    kind = Kind("mine", "known", "fast", divided=True, replicated=False)
    assert list(kind.wider()) == [
        kind,
        Kind("mine", "known", "fast", divided=True),
        Kind("mine", "known", "fast"),
        Kind("mine", "known"),
        Kind("mine", None),
        ALL,
    ]
    assert interval_of_kind(kind) == interval_of_kind(ALL)


def test_kernels_that_nobody_measured_have_the_interval_of_all_gpus() -> None:
    model = profile(layer("a"), layer("b"))
    own = Device(kind="cuda", name="NVIDIA A100 SXM 80 GB")
    unmeasured = own.model_copy(update={"shares_of": "another"})
    cluster = flat_cluster(2, 1e9)
    near, far = (
        interval_of(
            model.model_copy(update={"device": each}), cluster, divided=True, replicated=True
        )
        for each in (own, unmeasured)
    )
    assert near is not None
    assert far == interval_of_kind(ALL)
    assert far.most - far.least > near.most - near.least


def test_a_stack_that_nobody_judged_has_the_widest_interval_around() -> None:
    """The runs of this GPU with other kernels, and those of other GPUs with a stack."""
    kind = Kind(DEVICES["a100-80gb"].name, "known", "fast", divided=True, replicated=True)
    with_stack = interval_of_kind(replace(kind, stack="compiled"))
    own = interval_of_kind(kind)
    of_stacks = [row for row in TABLE["kinds"] if row["stack"] and not row["gpu"]]
    assert with_stack.least == min(own.least, *(row["least"] for row in of_stacks))
    assert with_stack.most == max(own.most, *(row["most"] for row in of_stacks))
    assert interval_of_kind(Kind("", "known", stack="compiled")).most >= with_stack.most


def test_a_stack_that_was_judged_has_its_own_interval() -> None:
    judged = next(row for row in TABLE["kinds"] if row["stack"] and row["gpu"])
    names = ("gpu", "links", "network", "divided", "replicated", "stack")
    found = interval_of_kind(Kind(**{name: judged[name] for name in names}))
    assert (found.least, found.most) == (judged["least"], judged["most"])


def test_a_mixture_of_experts_has_none() -> None:
    gpu = Device(kind="cuda", name=DEVICES["h100"].name)
    experts = layer("b").model_copy(update={"op": "GptOssExperts"})
    cluster = flat_cluster(2, "10Gbps")
    for other, has_one in ((layer("b"), True), (experts, False)):
        model = profile(layer("a"), other).model_copy(update={"device": gpu})
        found = interval_of(model, cluster, divided=False, replicated=True)
        assert (found is not None) is has_one


def test_networks() -> None:
    """PCIe joins a server; a flat cluster over Ethernet is none."""
    assert network_of(flat_cluster(1, 1e9)) == "one server"
    assert network_of(flat_cluster(8, "nvlink3")) == "one server"
    assert network_of(flat_cluster(4, 4e9)) == "one server"
    assert network_of(flat_cluster(4, "10Gbps")) == "slow"
    assert network_of(hierarchical_cluster((8, 4), ("nvlink3", "400Gbps"))) == "fast"
    assert network_of(hierarchical_cluster((8, 4), ("nvlink3", "100Gbps"))) == "slow"
    assert network_of(hierarchical_cluster((8, 1), ("nvlink3", "100Gbps"))) == "one server"
    assert network_of(hierarchical_cluster((1, 8), ("nvlink3", "100Gbps"))) == "slow"


def test_the_table_says_where_it_comes_from() -> None:
    assert TABLE["made_by"] == "python -m benchmarks.gpu_truth.intervals"
    assert all(kind["sets"] for kind in TABLE["kinds"])


def test_several_kinds_of_gpus_have_the_widest_of_theirs() -> None:
    devices = [Device(kind="cuda", name=DEVICES[name].name) for name in ("t4", "a100-80gb")]
    models = [profile(layer("a")).model_copy(update={"device": device}) for device in devices]
    both = profile_of_kinds(
        {device.name: model for device, model in zip(devices, models, strict=True)}
    )
    cluster = flat_cluster(2, 1e9)
    alone = [interval_of(each, cluster, divided=False, replicated=True) for each in models]
    found = interval_of(both, cluster, divided=False, replicated=True)
    assert found == Interval(
        min(each.least for each in alone if each), max(each.most for each in alone if each)
    )
