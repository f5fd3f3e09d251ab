"""Profiles at several lengths: what the fits say of a length that none of them was profiled at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import planner
from planner.formats.profile import Fit, Profile, load_profile
from planner.plan.lengths import terms
from planner.profiler.lengths import fitted, other_lengths
from tests.executor.varying import MODELS

# In place of what the causal model has, so that its layers take more than the calls to them.
WIDER = {
    "nn.Embedding(23, 16), nn.Embedding(12, 16)": "nn.Embedding(23, 256), nn.Embedding(512, 256)",
    "nn.LayerNorm(16), nn.Linear(16, 48)": "nn.LayerNorm(256), nn.Linear(256, 768)",
    "nn.Linear(16, 16)": "nn.Linear(256, 256)",
    "nn.Linear(16, 32), nn.Linear(32, 16)": "nn.Linear(256, 512), nn.Linear(512, 256)",
    "nn.Linear(16, 23)": "nn.Linear(256, 23)",
    "unflatten(-1, (4, 4))": "unflatten(-1, (4, 64))",
    ".double()": "",
    '"words": (3, 12)': '"words": (32, 512)',
    "randint(3, 13": "randint(32, 513",
}


def write(folder: Path, name: str, changes: Mapping[str, str] = WIDER) -> Path:
    source = MODELS[name].replace("SAMPLES", "300")
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path


def at_length(folder: Path, words: int) -> Path:
    """The causal model with this greatest length, so that its profile is at that length."""
    return write(
        folder,
        "causal",
        WIDER
        | {'"words": (3, 12)': f'"words": (32, {words})', "randint(3, 13": f"randint(32, {words}"},
    )


def value(fit: Fit, lengths: tuple[int, ...], most: tuple[int, ...]) -> float:
    return float(np.dot(terms([lengths], most)[0], fit.shares))


def test_fits_find_what_costs_are_made_of() -> None:
    points = [(100, 80), (10, 8), (100, 8), (10, 80), (40, 32), (70, 56)]
    at = np.array(terms(points, (100, 80)))
    drawing = np.random.default_rng(3)
    made = {
        "constant": [1, 0, 0, 0, 0, 0],
        "linear": [2, 3, 0, 0, 0, 0],
        "quadratic": [1, 0, 5, 0, 0, 4],
    }
    exact = at @ np.array(list(made.values())).T
    for fit, (kind, shares), greatest in zip(
        fitted(at, exact), made.items(), exact[0], strict=True
    ):
        assert fit.kind == kind
        assert fit.shares == pytest.approx([share / greatest for share in shares], abs=1e-9)
        assert fit.residual < 1e-9
    noisy = fitted(at, exact * drawing.normal(1, 0.02, exact.shape))
    assert all(0 < fit.residual < 0.05 and min(fit.shares) >= 0 for fit in noisy)
    (nothing,) = fitted(at, np.zeros((6, 1)))
    assert nothing.shares == (0.0,) * 6


# On a GPU a short batch takes as long as its kernels take to launch, and a sum of powers has no
# corner.
@pytest.mark.parametrize(("device", "misses"), [("cpu", 0.02), ("v100", 0.08)])
def test_an_estimate_at_another_length(device: str, misses: float, tmp_path: Path) -> None:
    varying = planner.estimate(write(tmp_path, "causal"), batch_size=4, device=device)
    assert varying.lengths is not None
    assert varying.lengths.profiled == ((512,), (32,), (192,), (352,))
    fixed = planner.estimate(at_length(tmp_path / "other", 260), batch_size=4, device=device)
    for layer, fits, other in zip(
        varying.layers, varying.lengths.layers, fixed.layers, strict=True
    ):
        flops = [(each.forward_flops or 0) + (each.backward_flops or 0) for each in (layer, other)]
        for fit, (own, there) in (
            (fits.saved_bytes, (layer.saved_bytes, other.saved_bytes)),
            (fits.flops, flops),
        ):
            assert value(fit, (260,), (512,)) * own == pytest.approx(there, rel=1e-3, abs=1)
        for fit, passed, same in zip(fits.outputs, layer.outputs, other.outputs, strict=True):
            assert value(fit, (260,), (512,)) * passed.output_bytes == pytest.approx(
                same.output_bytes, rel=1e-9
            )
    total = sum(
        value(fits.forward_s, (260,), (512,)) * layer.forward_s
        + value(fits.backward_s, (260,), (512,)) * layer.backward_s
        for layer, fits in zip(varying.layers, varying.lengths.layers, strict=True)
    )
    assert total == pytest.approx(
        sum(each.forward_s + each.backward_s for each in fixed.layers), rel=misses
    )


def test_two_lengths_are_told_apart(tmp_path: Path) -> None:
    found = planner.estimate(write(tmp_path, "translator", {}), batch_size=4, device="v100")
    assert found.lengths is not None
    assert found.lengths.names == ("source", "target")
    fits = {
        layer.name: each for layer, each in zip(found.layers, found.lengths.layers, strict=True)
    }
    assert fits["encoder.0.linear1"].flops.shares == pytest.approx((0, 1, 0, 0, 0, 0))
    assert fits["decoder.0.linear1"].flops.shares == pytest.approx((0, 0, 1, 0, 0, 0))
    # Projections of queries with the target, of keys and values with the source, and their products
    # with both.
    across = fits["decoder.0.multihead_attn"].flops.shares
    assert [number for number, share in enumerate(across) if share > 1e-9] == [1, 2, 4]
    rows = list(zip(*found.lengths.samples, strict=True))
    assert len(rows) == 300
    # As collate() of the model file makes them of a sentence.
    assert all(
        3 <= source <= 12 and target == min(2 + source // 2, source - 1)
        for source, target in rows
        if source < 12
    )


def test_a_profile_without_lengths_is_as_it_was() -> None:
    profile = load_profile("profiles/vgg16/cpu.json")
    assert "lengths" not in profile.model_dump()
    # As before there were lengths: plans name their profile by it.
    assert profile.digest == "00723751f8a611d13df0b84dc23be51dab9b12edd09b8f177caaf2701b5956d5"


def test_what_a_profile_says_of_lengths_can_be_read_and_shown(tmp_path: Path) -> None:
    found = planner.estimate(write(tmp_path, "causal", {}), batch_size=4, device="cpu")
    found.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == found
    shown = str(found)
    for words in ("words 3 to 12, mean", "fitted to 4 lengths", "in length", "linear, 0% off"):
        assert words in shown
    wrong = found.model_dump(mode="json")
    wrong["lengths"]["layers"].pop()
    with pytest.raises(ValueError, match="lengths has not one fit for each layer"):
        Profile.model_validate(wrong)


@pytest.mark.slow
def test_a_measurement_at_another_length(tmp_path: Path) -> None:
    varying = planner.profile(write(tmp_path, "causal"), batch_size=2, seconds=16)
    assert varying.lengths is not None
    assert [
        each["words"] for each in other_lengths(planner.load_model_file(tmp_path / "causal.py"))
    ] == [32, 192, 352]
    fixed = planner.profile(at_length(tmp_path / "other", 260), batch_size=2, seconds=6)
    total = sum(
        value(fits.forward_s, (260,), (512,)) * layer.forward_s
        + value(fits.backward_s, (260,), (512,)) * layer.backward_s
        for layer, fits in zip(varying.layers, varying.lengths.layers, strict=True)
    )
    # Other processes take time from both measurements.
    assert total == pytest.approx(
        sum(each.forward_s + each.backward_s for each in fixed.layers), rel=0.25
    )
    saved = [value(fits.saved_bytes, (260,), (512,)) for fits in varying.lengths.layers]
    for layer, share, other in zip(varying.layers, saved, fixed.layers, strict=True):
        assert share * layer.saved_bytes == pytest.approx(other.saved_bytes, rel=0.01, abs=100)
