"""The table of devices: a GPU whose kernels nobody measured is not priced by the best of others."""

from __future__ import annotations

import pytest

from planner.formats.profile import Device
from planner.profiler.estimated.devices import DEVICES
from planner.reporting.tables.device import device_words, unmeasured_words

UNMEASURED = {
    "b200": "h200",
    "mi300x": "h100",
    "rtx-4090": "l40s",
    "rtx-5090": "l40s",
}


@pytest.mark.parametrize(("name", "nearest"), UNMEASURED.items())
def test_shares_are_those_of_the_nearest_kind(name: str, nearest: str) -> None:
    spec, measured = DEVICES[name], DEVICES[nearest]
    assert spec.like == measured.name
    assert measured.like is None
    assert spec.achieved_arithmetic["gemm"] <= measured.achieved_arithmetic["gemm"]
    assert spec.achieved_arithmetic["attention"] <= measured.achieved_arithmetic["attention"]
    assert spec.achieved_bandwidth["pointwise"] <= measured.achieved_bandwidth["pointwise"]
    assert spec.achieved_bandwidth["norm"] == measured.achieved_bandwidth["norm"]


def test_what_was_measured_of_such_a_kind_is_kept() -> None:
    assert DEVICES["mi300x"].achieved_arithmetic["gemm"] == 0.45
    assert DEVICES["b200"].achieved_arithmetic["gemm"] == 0.7


def test_answers_say_so() -> None:
    device = Device(kind="cuda", name="mine", shares_of=DEVICES["h100"].name)
    words = (
        "not all of its kernels were measured: the others are priced as on NVIDIA H100 SXM 80 GB"
    )
    assert unmeasured_words(device) == words
    assert device_words(device) == f"mine (cuda); {words}"
    assert unmeasured_words(Device(kind="cuda", name="mine")) is None
