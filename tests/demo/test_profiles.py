"""The model files under profiles/: published sizes, and data that fit the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.model.batch import collate
from planner.model.loss import loss_of
from planner.model.spec import load_model_file

PROFILES = Path(__file__).parents[2] / "profiles"


def _weights(width: int) -> int:
    """Return the number of weights of an LSTM layer as wide as its input."""
    return 4 * width * (2 * width + 2)


# VGG-16 and ResNet-50 have 138,357,544 and 25,557,032 weights with 1,000 classes and 224x224
# images; here there are 10 classes, and VGG's first linear layer reads 512 values, not 25,088.
# GPT-2 small has 124,439,808.
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("vgg16", 138_357_544 - (25_088 - 512) * 4096 - 990 * 4097),
        ("resnet50", 25_557_032 - 990 * 2049),
        ("gpt2", 124_439_808),
        # with the weights of BatchNorm, without biases before it, for two classes
        ("unet", 31_037_698),
        ("lstm_lm", 256 * 650 + 2 * _weights(650) + 651 * 256),
    ],
)
def test_sizes_are_the_published_ones(name: str, weights: int) -> None:
    with torch.device("meta"):
        model = load_model_file(PROFILES / name / "model.py").build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


@pytest.mark.parametrize(("name", "weights"), [("bert", 109_514_298), ("t5", 60_506_624)])
def test_sizes_of_transformers_models(name: str, weights: int) -> None:
    """Sizes of BERT-base with its head for masked words, and of T5-small."""
    pytest.importorskip(
        "transformers", reason="needs the extra 'hf': pip install 'transformers>=4.50'"
    )
    test_sizes_are_the_published_ones(name, weights)


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gpt2", "lstm_lm"])
def test_data_are_like_the_example(name: str) -> None:
    file = load_model_file(PROFILES / name / "model.py")
    dataset = file.dataset()
    assert dataset is not None
    batch, example = collate([dataset[index] for index in range(2)]), file.example_batch(2)
    assert batch.flatten()[1] == example.flatten()[1]
    for mine, theirs in zip(batch.flatten()[0], example.flatten()[0], strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
    assert file.name == name


@pytest.mark.parametrize("spec", ["gpt2/model.py:build_tiny", "lstm_lm/model.py:build_tiny"])
def test_small_language_models_learn(spec: str) -> None:
    torch.manual_seed(0)
    file = load_model_file(f"{PROFILES}/{spec}")
    model, dataset = file.build_model(), file.dataset()
    assert dataset is not None
    optimizer = file.optimizer(model.parameters())
    losses = []
    for step in range(30):
        batch = collate([dataset[(step * 7 + index) * 97] for index in range(8)])
        loss = loss_of(model(*batch.args), batch.target, file.loss)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.0
