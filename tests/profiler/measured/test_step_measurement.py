"""Divided layers measured on one device, beside the same layers estimated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import planner
from planner.errors import InputError
from planner.formats.profile import DegreeCosts, Profile
from tests.executor.models import write_model

SAME = (
    "forward_reduced_bytes",
    "backward_reduced_bytes",
    "forward_reduces",
    "backward_reduces",
    "weight_bytes",
)


def of_two(profile: Profile) -> DegreeCosts:
    assert profile.tensor is not None
    (costs,) = profile.tensor
    assert costs.degree == 2
    return costs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["attention", "experts", "experts alone"])
def test_ranks_hold_and_exchange_what_the_plan_says(model: str, tmp_path: Path) -> None:
    """What a rank runs is timed here, and runs without data there; both count its weights and
    collectives alike.
    """
    path = write_model(tmp_path, model, "adamw")
    profile = planner.profile(path, batch_size=2, seconds=0.1, repeats=3, tensor=(2,))
    measured = of_two(profile)
    estimated = of_two(planner.estimate(path, device="cpu", batch_size=2, tensor=(2,)))
    for name in SAME:
        assert getattr(measured, name) == getattr(estimated, name), name
    assert (measured.by_samples, measured.experts) == (estimated.by_samples, estimated.experts)
    assert measured.source == "measured"
    assert all(seconds > 0 for seconds in measured.forward_s)
    assert sum(measured.weight_bytes) < sum(layer.weight_bytes for layer in profile.layers)
    assert sum(measured.optimizer_bytes) < sum(layer.optimizer_bytes for layer in profile.layers)
    assert sum(measured.saved_bytes) < sum(layer.saved_bytes for layer in profile.layers)
    assert not dist.is_initialized()


def test_a_rank_is_measured_with_its_tokens_too(tmp_path: Path) -> None:
    """It exchanges more often then: gathers, scatters, and the gradients of norms, but computes
    norms for its part.
    """
    path = write_model(tmp_path, "attention", "adamw")
    profile = planner.profile(path, batch_size=2, seconds=0.1, repeats=3, tensor=(2,))
    whole = of_two(profile)
    by_tokens = whole.by_tokens
    assert by_tokens is not None
    assert (by_tokens.degree, by_tokens.source, by_tokens.by_tokens) == (2, "measured", None)
    assert by_tokens.weight_bytes == whole.weight_bytes
    assert sum(by_tokens.saved_bytes) < sum(whole.saved_bytes)
    assert sum(by_tokens.backward_reduces) > sum(whole.backward_reduces)
    for name, one, other in zip(
        profile.layers, whole.saved_bytes, by_tokens.saved_bytes, strict=True
    ):
        assert other <= one, name


def test_what_is_not_measured_together(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "sgd")
    with pytest.raises(InputError, match="does not say how its layers are sharded"):
        planner.profile(path, batch_size=2, seconds=0.0, repeats=1, tensor=(2,))
    with pytest.raises(InputError, match="`tensor` and `compile`"):
        planner.profile(path, batch_size=2, compile=True, tensor=(2,))
