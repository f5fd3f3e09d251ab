"""What a loss is a mean over is found by trials, whatever the example batch shows; ambiguity is no
evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from planner.formats.profile import ForbiddenLabel, LossMean
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN
from planner.model.spec import TrainingSpec, in_memory
from planner.profiler.loss_mean.find import find_loss_mean

Loss = Callable[[Any, Any], Tensor]
SAMPLES, WHOLE = LossMean(over="samples"), LossMean(over="batch")
PLAIN_CLASSES = LossMean(over="samples", forbidden=(ForbiddenLabel(leaf=1, value=-100),))


def found(spec: TrainingSpec, size: int = 4) -> LossMean:
    torch.manual_seed(0)
    batch = spec.example_batch(size)
    graph = capture_file(spec, batch, spec.build_model())
    mean = find_loss_mean(spec, graph, batch, PLAIN)
    assert mean is not None
    return mean


def spec_of(
    model: nn.Module, example: Callable[[int], Any], loss: Loss | None = None, **more: Any
) -> TrainingSpec:
    return in_memory(model, example_batch=example, loss=loss, **more)


def features(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))


def classes(size: int) -> Any:
    return (torch.randn(size, 8),), torch.randint(0, 4, (size,))


def numbers(size: int) -> Any:
    return (torch.randn(size, 8),), torch.randn(size, 4)


def words(size: int) -> Any:
    return (torch.randint(0, 11, (size, 6)),), torch.randint(1, 11, (size, 6))


class Words(nn.Module):
    """A language model whose head begins at zero: it gives every label the same loss."""

    def __init__(self, *, zero: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.words(tokens))
        return result


def of_words(**options: Any) -> Loss:
    return lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none", ignore_index=7)
    counts = target.flatten() != 7
    return ((1 - torch.exp(-each)) ** 2 * each * counts).sum() / counts.sum()


def masked(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    values, mask = target
    return ((output - values) ** 2 * mask).sum() / mask.sum()


def contrastive(output: Tensor, _: object) -> Tensor:
    output = F.normalize(output, dim=-1)
    return F.cross_entropy(output @ output.T, torch.arange(output.shape[0]))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(
            of_words(), LossMean(over="labels", ignored=-100), id="all labels alike at first"
        ),
        pytest.param(
            of_words(ignore_index=0), LossMean(over="labels", ignored=0), id="labels of one's own"
        ),
        pytest.param(focal, LossMean(over="labels", ignored=7), id="focal"),
        pytest.param(of_words(reduction="sum"), LossMean(over="sum"), id="sum"),
        pytest.param(
            lambda output, target: (
                F.cross_entropy(output.transpose(1, 2), target, reduction="none").sum(1).mean()
            ),
            SAMPLES,
            id="sum over labels, mean over samples",
        ),
    ],
)
def test_a_head_that_begins_at_zero_hides_nothing(loss: Loss, expected: LossMean) -> None:
    assert found(spec_of(Words(), words, loss)) == expected


@pytest.mark.parametrize(
    ("example", "loss", "expected"),
    [
        pytest.param(classes, F.cross_entropy, PLAIN_CLASSES, id="classes"),
        pytest.param(
            classes, nn.CrossEntropyLoss(label_smoothing=0.1), PLAIN_CLASSES, id="smoothed classes"
        ),
        pytest.param(numbers, F.mse_loss, SAMPLES, id="squares"),
        pytest.param(
            lambda size: ((torch.randn(size, 8),), torch.randint(0, 2, (size, 4)).float()),
            F.binary_cross_entropy_with_logits,
            SAMPLES,
            id="several classes at once",
        ),
        pytest.param(numbers, contrastive, WHOLE, id="contrastive"),
        pytest.param(
            classes,
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4])),
            WHOLE,
            id="weighted classes",
        ),
        pytest.param(
            lambda size: ((torch.ones(size, 8),), torch.zeros(size, 4)),
            F.mse_loss,
            SAMPLES,
            id="constant example",
        ),
        pytest.param(
            lambda size: ((torch.ones(1, 8).repeat(size, 1),), torch.zeros(size, dtype=torch.long)),
            F.cross_entropy,
            PLAIN_CLASSES,
            id="one sample, repeated",
        ),
    ],
)
def test_ordinary_losses_are_told_apart(
    example: Callable[[int], Any], loss: Loss, expected: LossMean
) -> None:
    assert found(spec_of(features(), example, loss)) == expected


@pytest.mark.parametrize(
    ("mask", "loss", "ignored"),
    [
        pytest.param(lambda size: torch.ones(size, 4), masked, 0, id="floats"),
        pytest.param(lambda size: torch.ones(size, 4, dtype=torch.bool), masked, 0, id="booleans"),
        pytest.param(
            lambda size: torch.zeros(size, 4, dtype=torch.bool),
            lambda output, target: masked(output, (target[0], ~target[1])),
            1,
            id="what is padding",
        ),
    ],
)
def test_masks_of_which_the_example_has_none_are_tried(
    mask: Callable[[int], Tensor], loss: Loss, ignored: int
) -> None:
    spec = spec_of(
        features(), lambda size: ((torch.randn(size, 8),), (torch.randn(size, 4), mask(size))), loss
    )
    assert found(spec) == LossMean(over="labels", ignored=ignored, leaf=2)


class WithTargets(nn.Module):
    """As nanoGPT: the targets are an argument of any name, and -1 is no target."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Words()

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(idx)
        return logits, F.cross_entropy(logits.view(-1, 11), targets.view(-1), ignore_index=-1)


@pytest.mark.parametrize("by_name", [False, True])
def test_targets_inside_the_model_are_found(by_name: bool) -> None:
    def example(size: int) -> Any:
        (idx,), targets = words(size)
        return ({"idx": idx, "targets": targets} if by_name else (idx, targets)), None

    mean = found(spec_of(WithTargets(), example, lambda output, _: output[1]))
    assert mean == LossMean(over="labels", ignored=-1, leaf=1)


class Rows(Dataset[Any]):
    """Samples of which a third has no label."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return (torch.randn(8, generator=torch.Generator().manual_seed(index)),), torch.tensor(
            -100 if index % 3 == 0 else index % 4
        )


def test_ignored_samples_of_the_dataset_count() -> None:
    spec = spec_of(features(), classes, F.cross_entropy, dataset=Rows())
    assert found(spec) == LossMean(over="labels", ignored=-100, leaf=1)


def test_two_kinds_of_labels_hold_while_none_is_ignored() -> None:
    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output[:, :4], target[0]) + F.cross_entropy(output[:, 4:], target[1])

    def example(size: int) -> Any:
        return (torch.randn(size, 8),), (torch.randint(0, 4, (size,)), torch.randint(0, 5, (size,)))

    mean = found(spec_of(features(9), example, loss))
    assert mean.over == "samples"
    assert mean.forbidden == tuple(ForbiddenLabel(leaf=leaf, value=-100) for leaf in (1, 2))


class Experts(nn.Module):
    """A mixture whose load balancing, in training alone, is far below what rounding leaves of the
    loss.
    """

    def __init__(self, balance: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.balance = balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        most = chances.topk(2, -1)
        gates = torch.zeros_like(chances).scatter(-1, most.indices, most.values)
        mixed = torch.stack([expert(x) for expert in self.experts], 1)
        load = (gates > 0).to(x.dtype).mean(0)
        balance = (load * chances.mean(0)).sum() if self.training else chances.sum() * 0
        return self.head((gates.unsqueeze(-1) * mixed).sum(1)), self.balance * balance


@pytest.mark.parametrize(("balance", "expected"), [(1e-4, "batch"), (0.0, "samples")])
def test_gradients_show_what_losses_hide(balance: float, expected: str) -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target) + output[1]

    assert found(spec_of(Experts(balance), classes, loss)).over == expected


class Noisy(nn.Module):
    """As a variational autoencoder, with dropout and BatchNorm beside its noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.decoder = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        result: Tensor = self.decoder(mean + torch.randn_like(mean) * spread.exp())
        return result


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", SAMPLES), ("sum", LossMean(over="sum"))]
)
def test_parts_draw_the_noise_of_the_whole(reduction: str, expected: LossMean) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction=reduction)

    assert found(spec_of(Noisy(), numbers, loss)) == expected


class Permuted(nn.Module):
    """Draws what no part of a batch can draw: an order of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]
        result: Tensor = self.layer(mixed)
        return result


def test_what_cannot_be_told_is_not_checked() -> None:
    mean = found(spec_of(Permuted(), numbers, F.mse_loss))
    assert mean.over == "unchecked"
    assert mean.reason is not None


def test_the_model_is_as_before() -> None:
    torch.manual_seed(0)
    model = Noisy()
    model.encoder[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spec = spec_of(model, numbers, F.mse_loss)
    batch = spec.example_batch(4)
    graph = capture_file(spec, batch, model)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    find_loss_mean(spec, graph, batch, PLAIN)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert torch.get_default_dtype() == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_records_of_before_are_the_same() -> None:
    """Files of earlier versions have none of the new fields, and keep their digests."""
    old = {"over": "labels", "ignored": -100, "shifted": False, "accepted": False}
    assert LossMean.model_validate(old).model_dump() == old


class HalfInside(nn.Module):
    """Computes its middle in bfloat16, whose rounding is no difference between losses."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.middle(x.bfloat16() if self.by_hand else x).tanh()
        result: Tensor = self.head(x.float())
        return result


def test_rounding_of_the_models_own_autocast_hides_nothing() -> None:
    assert found(spec_of(HalfInside(by_hand=False), classes, F.cross_entropy)) == PLAIN_CLASSES


def test_a_model_that_runs_in_its_own_autocast_only_is_tried_in_it() -> None:
    """Its rounding is larger than what is allowed, so it may count as no mean, which is refused;
    but not as another.
    """
    mean = found(spec_of(HalfInside(by_hand=True), classes, F.cross_entropy))
    assert mean.over in ("batch", "unchecked") or mean == PLAIN_CLASSES


class Tagger(nn.Module):
    """Its loss, in its last block, is a mean over a mask's ones, and looks at values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([TaggerFront(), TaggerTail()])

    def forward(self, inputs: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.parts[1](self.parts[0](inputs, tags, mask))
        return result


class TaggerFront(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 16)

    def forward(self, inputs: Tensor, tags: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(inputs).tanh(), tags, mask


class TaggerTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden, tags, mask = values
        assert mask[:, 0].all()
        losses = F.cross_entropy(self.linear(hidden).transpose(1, 2), tags, reduction="none")
        return (losses * mask).sum() / mask.sum()


def test_a_mask_in_blocks_is_counted() -> None:
    def example(size: int) -> Any:
        tags = torch.randint(0, 5, (size, 6))
        return {
            "inputs": torch.randn(size, 6, 3),
            "tags": tags,
            "mask": torch.ones_like(tags).bool(),
        }, None

    tagger = Tagger()
    spec = spec_of(
        tagger, example, lambda output, _: output, blocks=lambda model: list(model.parts)
    )
    in_order = sorted(["inputs", "tags", "mask"])
    assert found(spec) == LossMean(over="labels", ignored=0, leaf=in_order.index("mask"))
