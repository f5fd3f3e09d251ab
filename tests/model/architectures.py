"""Small variants of the architectures that a user is most likely to bring, beside those in
models.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.model.batch import Batch
from tests.model.models import CASES as SMALL
from tests.model.models import Case


class AlexNet(nn.Module):
    """Krizhevsky et al. 2012: large kernels, adaptive pooling, dropout before each linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 6, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(6, 8, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(32, 16), nn.ReLU(inplace=True)),
            *(nn.Dropout(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return scores


class ConvNorm(nn.Module):
    """Convolution, BatchNorm, in-place ReLU."""

    def __init__(
        self, channels: int, width: int, kernel: int | tuple[int, int], **options: Any
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, bias=False, **options)
        self.bn = nn.BatchNorm2d(width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionBlock(nn.Module):
    """Four branches, joined along the channels; the third one splits in two itself, as in the E
    blocks.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch1x1 = ConvNorm(channels, 4, 1)
        self.branch5x5 = nn.Sequential(ConvNorm(channels, 3, 1), ConvNorm(3, 4, 5, padding=2))
        self.branch3x3_1 = ConvNorm(channels, 4, 1)
        self.branch3x3_2a = ConvNorm(4, 4, (1, 3), padding=(0, 1))
        self.branch3x3_2b = ConvNorm(4, 4, (3, 1), padding=(1, 0))
        self.branch_pool = ConvNorm(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        third = self.branch3x3_1(x)
        third = torch.cat([self.branch3x3_2a(third), self.branch3x3_2b(third)], 1)
        pool = self.branch_pool(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), self.branch5x5(x), third, pool], 1)


class Inception(nn.Module):
    """Szegedy et al. 2016, with the auxiliary classifier that exists in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 6, 3, stride=2)
        self.mixed_a, self.mixed_b, self.mixed_c = (
            InceptionBlock(6),
            InceptionBlock(20),
            InceptionBlock(20),
        )
        self.aux = nn.Sequential(
            ConvNorm(20, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
        )
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.mixed_b(self.mixed_a(self.stem(x)))
        aux = self.aux(x) if self.training else None
        x = self.mixed_c(x)
        x = self.dropout(F.adaptive_avg_pool2d(x, 1)).flatten(1)
        scores: Tensor = self.fc(x)
        return scores if aux is None else (scores, aux)


class UNetNorm(nn.Module):
    """Ronneberger et al. 2015: two levels down and up, BatchNorm, a score for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._double(3, 4), self._double(4, 8)])
        self.bottom = self._double(8, 16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.merge = nn.ModuleList([self._double(16, 8), self._double(8, 4)])
        self.head = nn.Conv2d(4, 5, 1)

    @staticmethod
    def _double(channels: int, width: int) -> nn.Module:
        return nn.Sequential(
            ConvNorm(channels, width, 3, padding=1), ConvNorm(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        scores: Tensor = self.head(x)
        return scores


class S2VT(nn.Module):
    """Venugopalan et al. 2015: two stacked LSTMs read the frames of a film, then write words;
    padding in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.word = nn.Linear(12, 8), nn.Embedding(20, 8)
        self.video, self.text = nn.LSTM(8, 8, batch_first=True), nn.LSTM(16, 8, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(8, 20)

    def forward(self, frames: Tensor, words: Tensor) -> Tensor:
        batch, length = words.shape
        seen = self.dropout(self.frame(frames))
        video, _ = self.video(torch.cat([seen, seen.new_zeros(batch, length, 8)], 1))
        words = torch.cat([seen.new_zeros(batch, frames.shape[1], 8), self.word(words)], 1)
        text, _ = self.text(torch.cat([video, words], 2))
        scores: Tensor = self.out(self.dropout(text[:, frames.shape[1] :]))
        return scores


class GNMT(nn.Module):
    """Wu et al. 2016: a bidirectional first layer, residual LSTMs, attention whose context every
    decoder layer gets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 8), nn.Embedding(24, 8)
        self.first = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList([nn.LSTM(8, 8, batch_first=True) for _ in range(2)])
        self.read = nn.LSTM(8, 8, batch_first=True)
        self.query, self.key, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.decoder = nn.ModuleList([nn.LSTM(16, 8, batch_first=True) for _ in range(2)])
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(8, 24)

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        memory, _ = self.first(self.dropout(self.source(source)))
        for layer in self.encoder:
            memory = memory + layer(self.dropout(memory))[0]
        x, _ = self.read(self.dropout(self.target(target)))
        energy = self.score(
            torch.tanh(self.query(x)[:, :, None] + self.key(memory)[:, None])
        ).squeeze(3)
        padding = torch.arange(source.shape[1], device=source.device)[None] >= lengths[:, None]
        context = energy.masked_fill(padding[:, None], float("-inf")).softmax(2) @ memory
        for layer in self.decoder:
            x = x + layer(torch.cat([self.dropout(x), context], 2))[0]
        scores: Tensor = self.out(x)
        return scores


@dataclass
class Answer:
    """Not registered with PyTorch's trees, as a user's dataclass is not."""

    scores: Tensor
    parts: dict[str, Tensor]
    note: str


class Towers(nn.Module):
    """Several inputs, some nested and some no tensors; a dataclass with several outputs, one
    without gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.mix = nn.Bilinear(8, 8, 8)
        self.head = nn.Linear(8, 4)

    def forward(
        self, both: dict[str, Any], mode: str, *, power: int, extra: Tensor | None = None
    ) -> Answer:
        left, right = both["left"], both["nested"][0]
        x = self.norm(F.elu(self.left(left)))
        y = torch.tanh(self.right(right)) ** power
        if extra is not None:
            y = y + extra[:, None]
        x = self.mix(x, y) if mode == "mix" else x + y
        scores = self.head(F.dropout(x, 0.2, self.training))
        return Answer(scores, {"left": x, "best": scores.argmax(1)}, mode)


def _pictures(batch_size: int) -> Batch:
    return Batch((torch.randn(batch_size, 3, 32, 32),), {}, torch.randint(0, 10, (batch_size,)))


def _pixels(batch_size: int) -> Batch:
    return Batch(
        (torch.randn(batch_size, 3, 16, 16),), {}, torch.randint(0, 5, (batch_size, 16, 16))
    )


def _film(batch_size: int) -> Batch:
    words = torch.randint(0, 20, (batch_size, 5))
    return Batch((torch.randn(batch_size, 4, 12), words[:, :-1]), {}, words[:, 1:])


def _sentences(batch_size: int) -> Batch:
    target = torch.randint(0, 24, (batch_size, 6))
    lengths = torch.randint(1, 8, (batch_size,))
    return Batch(
        (torch.randint(0, 20, (batch_size, 7)), target[:, :-1]), {"lengths": lengths}, target[:, 1:]
    )


def _towers(batch_size: int) -> Batch:
    both = {"left": torch.randn(batch_size, 6), "nested": (torch.randn(batch_size, 4), 3)}
    kwargs = {"power": 2, "extra": torch.rand(batch_size)}
    return Batch((both, "mix"), kwargs, torch.randint(0, 4, (batch_size,)))


def _with_auxiliary(output: Any, target: Tensor) -> Tensor:
    if not isinstance(output, tuple):
        return F.cross_entropy(output, target)
    return F.cross_entropy(output[0], target) + 0.4 * F.cross_entropy(output[1], target)


def _per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


ARCHITECTURES = {
    "vgg": SMALL["vgg"],
    "resnet": SMALL["resnet"],
    "gpt2": SMALL["gpt2"],
    "lstm": SMALL["lstm"],
    "mixed": SMALL["mixed"],
    "experts": SMALL["experts"],
    "alexnet": Case(AlexNet, _pictures, F.cross_entropy),
    "inception": Case(Inception, _pictures, _with_auxiliary),
    "unet": Case(UNetNorm, _pixels, F.cross_entropy),
    "s2vt": Case(S2VT, _film, _per_token),
    "gnmt": Case(GNMT, _sentences, _per_token),
    "towers": Case(Towers, _towers, lambda output, target: F.cross_entropy(output.scores, target)),
}
