"""The model files of published tables: sizes, and small variants that are captured, cut and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.model.capture.capture import capture
from planner.model.spec import load_model_file
from tests.model.splitting import assert_same, cut_evenly, run_split

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks" / "published" / "configs" / "models"


def _lstm(before: int, width: int) -> int:
    return 4 * width * (before + width + 2)


_GNMT_8 = (
    2 * 32_320 * 1024  # embeddings
    + 1025 * 32_320  # classifier
    + 2 * _lstm(1024, 1024)  # the bidirectional layer
    + _lstm(2048, 1024)
    + 2 * _lstm(1024, 1024)
    + _lstm(1024, 1024)  # the decoder's first
    + 3 * _lstm(2048, 1024)
    + 2 * 1024**2  # attention
    + 2 * 1024
    + 1
)


# The first five are from their authors, torchvision's documentation or PipeDream's profiles; we
# counted the others.
@pytest.mark.parametrize(
    ("path", "weights"),
    [
        (PUBLISHED / "vgg16.py", 138_357_544),
        (PUBLISHED / "resnet50.py", 25_557_032),
        (ROOT / "profiles/alexnet/model.py", 61_100_840),
        (ROOT / "profiles/inception_v3/model.py", 27_161_264),
        (ROOT / "profiles/gnmt8/model.py", _GNMT_8),
        (
            ROOT / "profiles/gnmt16/model.py",
            _GNMT_8 + 4 * _lstm(1024, 1024) + 4 * _lstm(2048, 1024),
        ),
        (
            ROOT / "profiles/s2vt/model.py",
            4097 * 500 + _lstm(500, 1000) + _lstm(1500, 1000) + 46_168 * 500 + 46_168 * 1001,
        ),
        (
            ROOT / "profiles/awd_lm/model.py",
            10_000 * (400 + 401) + _lstm(400, 1150) + 4 * _lstm(1150, 1150) + _lstm(1150, 400),
        ),
    ],
)
def test_sizes(path: Path, weights: int) -> None:
    with torch.device("meta"):
        model = load_model_file(path).build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("s2vt", "awd_lm", "inception_v3", "gnmt8", "gnmt16")
]


@pytest.mark.parametrize("name", ["alexnet", *SLOW])
def test_small_variants_are_cut_and_run(name: str) -> None:
    file = load_model_file(f"{ROOT}/profiles/{name}/model.py:build_tiny")
    torch.manual_seed(0)
    model = file.build_model()
    batch = file.example_batch(2)
    graph = capture(model, batch, file.loss)
    assert len(graph.layers) >= 6
    whole, split = (
        run_split(graph, batch, cut_evenly(graph, stages), (7, 3, 1)) for stages in (1, 5)
    )
    assert torch.isfinite(whole.loss)
    assert all(gradient is not None for gradient in whole.gradients.values())
    assert_same(whole, split)
