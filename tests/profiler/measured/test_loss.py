"""Captured models compute the models' own losses or are refused, and what those losses are means
over is found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError, InputError, ModelFileError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import LossMean, Profile
from planner.model.spec import TrainingSpec, in_memory
from planner.model.stage.stage import build_stage
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.solver import search_plan as solve
from tests.model.models import OfFour

OPTIONS = ProfilingOptions(device="cpu", seconds=0.0, repeats=1)
Rule = Callable[["_Own", Tensor], Tensor]


class _Own(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.calls = 0
        self._rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self._rule(self, self.norm(self.layer(x)))


def _depth(model: _Own, x: Tensor) -> Tensor:
    return x * random.random() if model.training else x


def _noise(_: _Own, x: Tensor) -> Tensor:
    return x + torch.as_tensor(np.random.randn(6).astype("float32"))


def _count(model: _Own, x: Tensor) -> Tensor:
    model.calls += 1
    return x / model.calls


def _dropout(_: _Own, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def _profile(rule: Rule) -> Profile:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(6, 6), _Own(rule), nn.Linear(6, 3))
    batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
    return profile_model(in_memory(model, example_batch=batch, loss=F.cross_entropy), 8, OPTIONS)


@pytest.mark.parametrize("rule", [_depth, _noise, _count])
def test_what_changes_from_call_to_call_is_refused(rule: Rule) -> None:
    with pytest.raises(CaptureError, match="two calls of the model with the same batch") as refused:
        _profile(rule)
    assert refused.value.hint is not None
    assert "counts of calls in buffers" in refused.value.hint


def test_layers_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Callable[..., dict[str, Tensor]]:
        stage = build_stage(*args)
        return lambda *values: {name: 1.01 * value for name, value in stage(*values).items()}

    monkeypatch.setattr("planner.model.stage.capture_check.build_stage", wrong)
    with pytest.raises(CaptureError, match="the model and its captured layers give losses of"):
        _profile(lambda _, x: x)


def test_noise_of_torch_is_no_fault() -> None:
    """As a diffusion model, whose loss draws its noise: divided minibatches draw other noise and
    are not refused.
    """
    profile = _profile(_dropout)
    assert profile.loss is not None
    assert profile.loss.over == "samples"
    cluster = flat_cluster(gpus=2, bandwidth_bytes_per_s=1e9)
    assert solve(profile, cluster, schedule="gpipe", microbatches=2).microbatches == 2


Loss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(**options: object) -> Loss:
    return lambda output, target: nn.functional.cross_entropy(
        output.flatten(0, 1),
        target.flatten(),
        **options,  # type: ignore[arg-type]
    )


def _of_large_tokens(output: Tensor, target: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    counts = target.flatten() > 5
    return (each * counts).sum() / counts.sum()


def _masked_by_hand(output: Tensor, target: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    counts = target.flatten() != 0
    return (each * counts).sum() / counts.sum()


def _contrastive(output: Tensor, _: Tensor) -> Tensor:
    features = output.mean(1)
    return nn.functional.cross_entropy(features @ features.T, torch.arange(output.shape[0]))


def _next_tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def _next_tokens_all_alike(output: Tensor, target: Tensor) -> Tensor:
    """Give every token nearly the same loss, as a large vocabulary and small first weights do."""
    return _next_tokens(0.005 * output, target)


def spec_of(loss: Loss) -> TrainingSpec:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11))
    batch = torch.randint(0, 11, (4, 6)), torch.randint(1, 11, (4, 6))
    return in_memory(model, example_batch=batch, loss=loss)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(
            _cross_entropy(),
            LossMean(over="labels", ignored=-100),
            id="labels that PyTorch ignores",
        ),
        pytest.param(
            _cross_entropy(ignore_index=0),
            LossMean(over="labels", ignored=0),
            id="labels of one's own",
        ),
        pytest.param(
            _masked_by_hand, LossMean(over="labels", ignored=0), id="labels masked by hand"
        ),
        pytest.param(
            _next_tokens, LossMean(over="labels", ignored=-100, shifted=True), id="next tokens"
        ),
        pytest.param(
            _next_tokens_all_alike,
            LossMean(over="labels", ignored=-100, shifted=True),
            id="next tokens, all alike",
        ),
        pytest.param(_cross_entropy(reduction="sum"), LossMean(over="sum"), id="a sum"),
        pytest.param(
            lambda output, _: output.square().mean(), LossMean(over="samples"), id="samples"
        ),
        pytest.param(_contrastive, LossMean(over="batch"), id="contrastive"),
        pytest.param(
            _of_large_tokens, LossMean(over="batch"), id="labels that the planner cannot know"
        ),
    ],
)
def test_the_profile_says_what_the_loss_is_a_mean_over(loss: Loss, expected: LossMean) -> None:
    assert profile_model(spec_of(loss), 4, OPTIONS).loss == expected


class _Head(nn.Linear):
    def forward(self, input: tuple[Tensor, object]) -> Tensor:  # type: ignore[override]
        return super().forward(input[0])


@pytest.mark.parametrize(("loss", "ignored"), [(_cross_entropy(), -100), (_masked_by_hand, 0)])
def test_ignored_labels_are_found_behind_blocks(loss: Loss, ignored: int) -> None:
    """A graph of blocks has none of the operations of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), _Head(8, 11))
    batch = torch.randint(0, 11, (4, 6)), torch.randint(1, 11, (4, 6))
    spec = in_memory(model, example_batch=batch, loss=loss)
    with_blocks = TrainingSpec(spec.name, {**spec.functions, "blocks": list})
    assert profile_model(with_blocks, 4, OPTIONS).loss == LossMean(over="labels", ignored=ignored)


@pytest.mark.parametrize(
    ("loss", "expected"), [(_cross_entropy(), "labels"), (_contrastive, "batch")]
)
def test_a_graph_of_one_batch_size_leaves_the_loss_to_the_model(loss: Loss, expected: str) -> None:
    """The divided minibatches of a Performer, whose graph has one size, trained on a mean of means
    before.
    """
    torch.manual_seed(0)

    class Pinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            result: Tensor = self.head(self.words(tokens)[: int(tokens.shape[0])])
            return result.view(*(int(size) for size in result.shape))

    batch = torch.randint(0, 11, (4, 6)), torch.randint(1, 11, (4, 6))
    spec = in_memory(Pinned(), example_batch=batch, loss=loss)
    profile = profile_model(spec, 4, OPTIONS)
    assert profile.loss is not None
    assert profile.loss.over == expected


def test_of_a_model_of_one_batch_size_the_outputs_are_divided() -> None:
    torch.manual_seed(0)
    spec = in_memory(
        OfFour(), example_batch=(torch.randn(4, 6), torch.randn(4, 6)), loss=F.mse_loss
    )
    assert profile_model(spec, 4, OPTIONS).loss == LossMean(over="samples")


def test_a_model_file_can_say_what_counts() -> None:
    spec = spec_of(_of_large_tokens)
    right = TrainingSpec(
        spec.name, {**spec.functions, "loss_weight": lambda target: (target > 5).sum()}
    )
    assert profile_model(right, 4, OPTIONS).loss == LossMean(over="loss_weight")
    wrong = TrainingSpec(
        spec.name, {**spec.functions, "loss_weight": lambda target: target.numel()}
    )
    with pytest.raises(ModelFileError, match=r"loss_weight\(\) of 'Sequential' does not count"):
        profile_model(wrong, 4, OPTIONS)
    broken = TrainingSpec(spec.name, {**spec.functions, "loss_weight": lambda target: "many"})
    with pytest.raises(ModelFileError, match="returned a str, not a number of labels"):
        profile_model(broken, 4, OPTIONS)


def test_a_loss_of_the_whole_batch_is_not_divided_unless_accepted() -> None:
    profile = profile_model(spec_of(_contrastive), 4, OPTIONS)
    cluster = flat_cluster(gpus=2, bandwidth_bytes_per_s=1e9)
    with pytest.raises(
        InputError, match="is not a mean over samples or labels, so the 8 microbatches"
    ) as error:
        solve(profile, cluster, schedule="1f1b-flush", microbatches=8)
    assert "`accept_divided_loss`" in str(error.value)
    plan = solve(profile, cluster, schedule="1f1b-flush", microbatches=8, accept_divided_loss=True)
    # so that training need not be told again
    assert plan.loss == LossMean(over="batch", accepted=True)
    assert solve(profile, cluster).schedule.name == "1f1b"
