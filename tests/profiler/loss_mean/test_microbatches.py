"""What microbatches do to buffers and to padding is tried, and not taken for a mean over
samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset

from planner.errors import InputError
from planner.formats.profile import LossMean
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN
from planner.model.spec import TrainingSpec, in_memory
from planner.plan.shape import check_divided_loss
from planner.profiler.loss_mean.buffers import buffer_of_parts
from planner.profiler.loss_mean.find import find_loss_mean
from planner.profiler.loss_mean.trial import Attempt
from planner.schedule.one_stage import FLUSH


def found(spec: TrainingSpec, size: int = 4) -> LossMean:
    torch.manual_seed(0)
    batch = spec.example_batch(size)
    graph = capture_file(spec, batch, spec.build_model())
    mean = find_loss_mean(spec, graph, batch, PLAIN)
    assert mean is not None
    return mean


def classes(size: int) -> Any:
    return (torch.randn(size, 6),), torch.randint(0, 5, (size,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


class Counting(Net):
    """Anneals by the number of its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Codebook(Net):
    """A VQ-VAE's, which moves by the mean of what it sees."""

    codes: Tensor
    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(7, 6))
        self.register_buffer("used", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        chosen = F.one_hot(nearest, 7).to(x.dtype)
        output = super().forward(F.embedding(nearest, self.codes))
        if self.training:
            self.used.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_((chosen.t() @ x) / self.used[:, None], alpha=0.1)
        return output


class CountingSamples(Net):
    """Counts samples, which are as many however they are divided; the loss reads them only in
    `Reading`.
    """

    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.samples += x.shape[0]
        return super().forward(x)


class Reading(CountingSamples):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.samples)


def spectral() -> nn.Module:
    model = Net()
    spectral_norm(model.a)
    return model


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("model", "buffer"),
    [
        (Counting, "calls"),
        (Codebook, "codes"),
        (spectral, "a.parametrizations.weight.0._u"),
        (Reading, "samples"),
    ],
)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["traced", "blocks"])
def test_a_buffer_that_sees_microbatches(model: Any, buffer: str, in_blocks: bool) -> None:
    blocks: dict[str, Any] = {"blocks": lambda net: [net]} if in_blocks else {}
    spec = in_memory(model(), example_batch=classes, loss=F.cross_entropy, **blocks)
    mean = found(spec)
    assert mean.over == "unchecked"
    assert mean.reason is not None
    assert f"'{buffer}'" in mean.reason
    with pytest.raises(InputError, match="forward\\(\\) changes buffer") as error:
        check_divided_loss("net", mean, FLUSH, 2)
    assert "`microbatches=1`" in error.value.hint
    check_divided_loss("net", mean, FLUSH, 1)


@pytest.mark.parametrize("model", [CountingSamples, norms])
def test_a_buffer_that_is_no_concern(model: Any) -> None:
    assert found(in_memory(model(), example_batch=classes, loss=F.cross_entropy)).over == "samples"


class Words(nn.Module):
    """Takes the mean over all places, or over those that are no padding."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 6), nn.Linear(6, 5)
        self.masks = masks

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        if self.masks:
            mask = tokens.ne(0).unsqueeze(-1).to(hidden.dtype)
            hidden = (hidden * mask).sum(1) / mask.sum(1)
        else:
            hidden = hidden.mean(1)
        result: Tensor = self.head(hidden)
        return result


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (2 + index * 5 % 7,), generator=generator), index % 5


def padded(samples: list[Any]) -> Any:
    tokens, targets = zip(*samples, strict=True)
    return (nn.utils.rnn.pad_sequence(list(tokens), batch_first=True),), torch.tensor(targets)


def sentences(size: int, longest: int = 8) -> Any:
    return (torch.randint(1, 20, (size, longest)),), torch.randint(0, 5, (size,))


@pytest.mark.parametrize(
    ("masks", "over"), [(False, "unchecked"), (True, "samples")], ids=["sees it", "masks it"]
)
def test_padding_to_the_longest_of_each_microbatch(masks: bool, over: str) -> None:
    spec = in_memory(
        Words(masks=masks),
        example_batch=sentences,
        loss=F.cross_entropy,
        dataset=Sentences(),
        lengths={"longest": (2, 8)},
        collate=padded,
    )
    mean = found(spec)
    assert mean.over == over
    if over == "unchecked":
        assert mean.reason is not None
        assert "how far samples are padded" in mean.reason


class Shared(nn.Module):
    """Two modules have one count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Net(), Net()
        count = torch.zeros(())
        self.one.register_buffer("calls", count)
        self.other.register_buffer("calls", count)

    def forward(self, x: Tensor) -> Tensor:
        self.one.calls.add_(1)  # type: ignore[operator]
        scale: Tensor = self.one.calls  # type: ignore[assignment]
        made: Tensor = self.one(x) + self.other(x)
        return made * scale


def test_a_buffer_that_modules_share() -> None:
    spec = in_memory(Shared(), example_batch=classes(4), loss=F.cross_entropy)
    model = spec.build_model()
    attempts = [Attempt(torch.float64), Attempt(torch.float32)]
    assert buffer_of_parts(spec, model, spec.example_batch(4), PLAIN, attempts) == "one.calls"
