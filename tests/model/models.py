"""Small models, each with something that a cut could break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from planner.model.batch import Batch
from profiles.gpt2.model import GPT2
from profiles.lstm_lm.model import LSTMLanguageModel
from profiles.resnet50.model import Bottleneck


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss; None where the model has its own."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor] | None


class OfFour(nn.Module):
    """Takes batches of four samples and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x).view(4, 6)
        return result


class SmallVGG(nn.Module):
    """In-place ReLU behind convolutions and linear layers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(
            *(
                nn.Linear(32, 16),
                nn.ReLU(inplace=True),
                nn.Dropout(0.5),
                nn.Linear(16, 16),
                nn.ReLU(),
                nn.Dropout(0.5),
            ),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


class SmallResNet(nn.Module):
    """BatchNorm, in-place additions and shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottleneck(3, 4, 1), Bottleneck(16, 4, 1), Bottleneck(16, 4, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.blocks(x).mean((2, 3)))
        return scores


class UNet(nn.Module):
    """Long skips: values used by several later layers, sizes that change."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 4, 2, 2)
        self.up1 = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(7, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        up = self.up2(F.relu(self.middle(second)) + second)
        up = self.up1(torch.cat([up, first], 1))
        scores: Tensor = self.head(torch.cat([up, x], 1)).mean((2, 3))
        return scores


class Mixed(nn.Module):
    """Keyword arguments, dict output, no_grad, constants, tied weights, unused weights,
    MultiheadAttention, dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 32)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(16.0), persistent=False)

    def forward(self, tokens: Tensor, *, scale: Tensor) -> dict[str, Any]:
        batch, length = tokens.shape
        positions = torch.as_tensor(self.positions)[:length]
        x = self.embedding(tokens) + positions[None, :, None] * 0.1 + torch.tensor(0.5)
        with torch.no_grad():
            mean = x.mean(0, keepdim=True)
        x = (x - mean) * scale[:, None, None]
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.relu(x.reshape(batch * length, 8)).view(batch, length, 8)
        x, (hidden, _) = self.lstm(x)
        return {"scores": self.head(x), "hidden": hidden}


class ConstantFirst(nn.Module):
    """Opens with layers that read no input, only how large the batch is, and hands integers across
    cuts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.types = nn.Embedding(4, 8)
        self.words = nn.Embedding(32, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.register_buffer("type_ids", torch.tensor([[0, 1, 2, 3, 0, 1]]))

    def forward(self, tokens: Tensor) -> Tensor:
        type_ids = torch.as_tensor(self.type_ids).expand(tokens.shape[0], -1)
        x = self.types(type_ids)
        x = torch.tanh(self.body(x + self.words(tokens)))
        scores: Tensor = self.head((x + self.types(type_ids.flip(1))).mean(1))
        return scores


class SharedNorm(nn.Module):
    """One BatchNorm called twice: its statistics must stay in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[1](self.layers[0](x)))
        x = self.norm(self.layers[2](x))
        scores: Tensor = self.head(torch.relu(self.layers[3](x)))
        return scores


class Experts(nn.Module):
    """Sends rows to one of two layers by their values: shapes inside depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.expert = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rows = torch.nonzero(x.sum(1) > 0).squeeze(1)
        x = x.index_add(0, rows, self.expert(x[rows]))
        scores: Tensor = self.head(x)
        return scores


class WrittenInPlace(nn.Module):
    """A value without gradient that gets one by being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :3] = self.left(x)[:, :3]
        y[:, 3:] = self.right(x)[:, 3:]
        scores: Tensor = self.head(y)
        return scores


class CausalMask(nn.Module):
    """Makes one mask for all its blocks, of constants and the batch's size alone, as transformers
    do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        far = (places[:, None] - places[None, :]).abs() * -0.1
        mask = far.masked_fill(places[None, :] > places[:, None], float("-inf")).expand(
            tokens.shape[0], 1, -1, -1
        )
        for block in self.blocks:
            query, key, value = block(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(
                1, 2
            ).flatten(2)
        scores: Tensor = self.head(x)
        return scores


class OwnLoss(nn.Module):
    """Computes its loss itself when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(x))
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


class SpectralNorm(nn.Module):
    """Reads weights, and writes buffers, in the same regions without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = spectral_norm(nn.Linear(6, 8)), spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return scores


def _images(batch_size: int) -> Batch:
    return Batch((torch.randn(batch_size, 3, 8, 8),), {}, torch.randint(0, 10, (batch_size,)))


def _tokens(batch_size: int, vocabulary: int, length: int = 12) -> Batch:
    tokens = torch.randint(0, vocabulary, (batch_size, length + 1))
    return Batch((tokens[:, :-1],), {}, tokens[:, 1:])


def _mixed(batch_size: int) -> Batch:
    tokens = torch.randint(0, 32, (batch_size, 9))
    return Batch((tokens[:, :-1],), {"scale": torch.rand(batch_size)}, tokens[:, 1:])


def _rows(batch_size: int) -> Batch:
    return Batch((torch.randn(batch_size, 6),), {}, torch.randint(0, 4, (batch_size,)))


def _words(batch_size: int) -> Batch:
    return Batch((torch.randint(0, 32, (batch_size, 6)),), {}, torch.randint(0, 10, (batch_size,)))


def _labelled(batch_size: int) -> Batch:
    return Batch(
        (torch.randn(batch_size, 6),), {"labels": torch.randint(0, 4, (batch_size,))}, None
    )


def _per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES = {
    "vgg": Case(SmallVGG, _images, F.cross_entropy),
    "resnet": Case(SmallResNet, _images, F.cross_entropy),
    "unet": Case(UNet, _images, F.cross_entropy),
    "gpt2": Case(lambda: GPT2(64, 16, 16, 2, 2), lambda size: _tokens(size, 64), _per_token),
    "lstm": Case(lambda: LSTMLanguageModel(12), lambda size: _tokens(size, 256), _per_token),
    "mixed": Case(Mixed, _mixed, lambda output, target: _per_token(output["scores"], target)),
    "constant first": Case(ConstantFirst, _words, F.cross_entropy),
    "shared norm": Case(SharedNorm, _rows, F.cross_entropy),
    "experts": Case(Experts, _rows, F.cross_entropy),
    "written in place": Case(WrittenInPlace, _rows, F.cross_entropy),
    "spectral norm": Case(SpectralNorm, _rows, F.cross_entropy),
    "causal mask": Case(CausalMask, lambda size: _tokens(size, 32), _per_token),
    "own loss": Case(OwnLoss, _labelled, None),
}
