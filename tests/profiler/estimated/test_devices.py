"""The table of devices: a GPU whose kernels nobody measured is not priced by the best of others."""

from __future__ import annotations

import pytest

from planner.formats.link_names import link_bandwidth, usual_between, usual_link
from planner.formats.profile import Device
from planner.profiler.estimated.devices import DEVICES
from planner.reporting.tables.device import device_words, unmeasured_words

UNMEASURED = {
    "b200": "h200",
    "gb200": "h200",
    "b300": "h200",
    "mi300x": "h100",
    "mi325x": "h100",
    "mi355x": "h100",
    "rtx-4090": "l40s",
    "rtx-5090": "rtx-pro-6000",
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
    assert DEVICES["rtx-pro-6000"].like is None


@pytest.mark.parametrize(
    ("name", "before"),
    [("gb200", "b200"), ("b300", "b200"), ("mi325x", "mi300x"), ("mi355x", "mi325x")],
)
def test_newer_ones_have_more_memory_and_no_less_speed(name: str, before: str) -> None:
    newer, older = DEVICES[name], DEVICES[before]
    assert (newer.memory_bytes or 0) > (older.memory_bytes or 0)
    assert newer.bandwidth_bytes_per_s > older.bandwidth_bytes_per_s
    assert newer.peak("bfloat16") >= older.peak("bfloat16")
    assert usual_between(name) in ("3200Gbps", "6400Gbps")
    assert usual_link(name) == usual_link(before)


def test_cards_that_do_not_reach_each_other_have_half_of_their_lanes() -> None:
    assert link_bandwidth(usual_link("rtx-4090")) == 12.9e9 < 0.6 * link_bandwidth("pcie4")
    assert link_bandwidth(usual_link("rtx-5090")) == 25.8e9 < 0.6 * link_bandwidth("pcie5")
    assert usual_link("rtx-pro-6000") == "pcie5"


def test_answers_say_so() -> None:
    device = Device(kind="cuda", name="mine", shares_of=DEVICES["h100"].name)
    words = (
        "not all of its kernels were measured: the others are priced as on NVIDIA H100 SXM 80 GB"
    )
    assert unmeasured_words(device) == words
    assert device_words(device) == f"mine (cuda); {words}"
    assert unmeasured_words(Device(kind="cuda", name="mine")) is None
