"""Model FLOP utilisation: by hand, and only where the peak is known."""

from __future__ import annotations

import pytest

from planner.cost.utilisation import peak_flops_per_s
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Device, Profile
from planner.profiler.estimated.devices import DEVICES, find_device
from planner.reporting.tables.plan import plan_report
from planner.reporting.tables.profile import profile_report
from planner.solver import search_plan as solve
from tests.samples import layer, profile

A100 = Device(kind="cuda", name="NVIDIA A100-SXM4-80GB")


def counted(device: Device = A100) -> Profile:
    """Return a profile of 3 s and 90 TFLOP per microbatch of 4 samples, each of 50 tokens."""
    one = layer("a").model_copy(
        update={"forward_flops": 30 * 10**12, "backward_flops": 60 * 10**12}
    )
    return profile(one).model_copy(
        update={"device": device, "autocast": "bfloat16", "tokens_per_sample": 50}
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100-PCIE-40GB", "a100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        (DEVICES["l4"].name, "l4"),
    ],
)
def test_devices_are_found_by_the_drivers_name(name: str, key: str | None) -> None:
    assert find_device(name) is (None if key is None else DEVICES[key])


def test_the_peak_is_of_the_precision_trained_in() -> None:
    assert peak_flops_per_s(counted()) == 312e12
    assert peak_flops_per_s(counted().model_copy(update={"autocast": None})) == 19.5e12
    assert (
        peak_flops_per_s(counted().model_copy(update={"autocast": None, "dtype": "tf32"})) == 156e12
    )
    assert peak_flops_per_s(counted(Device(kind="cpu", name="imagined", threads=1))) is None
    assert peak_flops_per_s(counted(Device(kind="cuda", name="imagined"))) is None
    assert (
        peak_flops_per_s(counted(Device(kind="cuda", name="my own", peak_flops_per_s=1e12))) == 1e12
    )


def test_a_plan_says_tokens_and_utilisation() -> None:
    shown = profile_report(counted())
    assert "90 TFLOP per microbatch, forward and backward, 50 tokens per sample" in shown
    plan = solve(counted(), flat_cluster(1, 1e9))
    assert plan.predicted.seconds_per_minibatch == 3
    assert plan.predicted.tokens_per_s == pytest.approx(4 * 50 / 3)
    assert plan.predicted.flop_utilisation == pytest.approx(90 / 3 / 312)
    text = plan_report(plan)
    assert "66.67 tokens/s, 1.333 samples/s, 3 s per minibatch" in text
    assert "9.6% of the GPUs' peak" in text


def test_a_plan_without_counts_says_neither() -> None:
    plan = solve(profile(layer("a")), flat_cluster(1, 1e9))
    assert plan.predicted.tokens_per_s is None
    assert plan.predicted.flop_utilisation is None
    assert "tokens" not in plan_report(plan)
    assert "utilisation" not in plan_report(plan)


def test_one_gpu_runs_the_same_minibatch() -> None:
    slow_update = profile(layer("a", 1, 2, update_s=6, weight_bytes=8))
    plan = solve(slow_update, flat_cluster(1, 1e9), schedule="1f1b-flush", microbatches=4)
    assert plan.predicted.speedup_over_one_gpu == pytest.approx(1)
