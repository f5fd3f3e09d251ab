"""The benchmark over all models runs, and its split by time is a split."""

from __future__ import annotations

import torch

from benchmarks.models.__main__ import BATCH_SIZES, COLUMNS
from benchmarks.models.measure import PROFILES, cut_by_time, measure_model
from planner.formats.profile import load_profile


def test_a_small_model() -> None:
    before = torch.get_num_threads()
    try:
        row = measure_model("unet", 2, 0.1, tiny=True, save=False)
    finally:
        torch.set_num_threads(before)
    assert set(row) == set(COLUMNS)
    assert [row[name] for name in ("3 stages", "7 stages", "evaluation")] == ["exact"] * 3


def test_every_profiled_model_has_a_batch_size() -> None:
    assert set(BATCH_SIZES) == {path.parent.name for path in PROFILES.glob("*/model.py")}


def test_the_split_by_time_is_balanced() -> None:
    profile = load_profile(PROFILES / "resnet50" / "cpu.json")
    times = {
        layer.name: layer.forward_s + layer.backward_s + layer.update_s for layer in profile.layers
    }
    cut = cut_by_time(profile, 4)
    assert [name for names in cut for name in names] == list(times)
    assert len(cut) == 4
    slowest = max(sum(times[name] for name in names) for names in cut)
    assert sum(times.values()) / 4 <= slowest < sum(times.values()) / 4 + max(times.values())
