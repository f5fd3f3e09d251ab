"""Intervals of estimated answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.formats.cluster import flat_cluster
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.profile import Device
from planner.plan import confidence
from planner.plan.confidence import Interval, interval_of, interval_of_kind
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
    assert interval_of(model, cluster, divided=False) is None  # of a CPU
    assert interval_of(gpu, cluster, divided=False) is not None
    measured = gpu.provenance.model_copy(update={"source": "measured"})
    assert (
        interval_of(gpu.model_copy(update={"provenance": measured}), cluster, divided=False) is None
    )


def test_every_kind_has_one() -> None:
    for spec in DEVICES.values():
        device = Device(kind="cuda", name=spec.name, shares_of=spec.like)
        for divided in (False, True):
            for links in ("known", "data sheet"):
                interval = interval_of_kind(device, divided=divided, links=links)
                assert 0 < interval.least < interval.most


def test_kernels_that_nobody_measured_have_the_widest() -> None:
    own = Device(kind="cuda", name="NVIDIA A100 SXM 80 GB")
    unmeasured = own.model_copy(update={"shares_of": "another"})
    near = interval_of_kind(own, divided=True, links="known")
    far = interval_of_kind(unmeasured, divided=True, links="known")
    assert far.least <= near.least
    assert far.most >= near.most


def test_the_table_says_where_it_comes_from() -> None:
    assert TABLE["made_by"] == "python -m benchmarks.gpu_truth.intervals"
    assert all(kind["sets"] for kind in TABLE["kinds"])


def test_several_kinds_of_gpus_have_the_widest_of_theirs() -> None:
    devices = [Device(kind="cuda", name=DEVICES[name].name) for name in ("t4", "a100-80gb")]
    models = [profile(layer("a")).model_copy(update={"device": device}) for device in devices]
    both = profile_of_kinds(
        {device.name: model for device, model in zip(devices, models, strict=True)}
    )
    alone = [interval_of(each, flat_cluster(2, 1e9), divided=False) for each in models]
    found = interval_of(both, flat_cluster(2, 1e9), divided=False)
    assert found == Interval(
        min(each.least for each in alone if each), max(each.most for each in alone if each)
    )
