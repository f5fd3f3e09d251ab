"""Small models of further architectures, each with something that depends on the device that it
runs on.

Devices written into nested graphs, autocast regions, constants made in forward, and cuts behind
operations that CUDA's autocast runs in float32 and the CPU's does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.model.batch import Batch
from tests.model.models import Case

WIDTH = 16


class ConvNeXt(nn.Module):
    """Liu et al. 2022: LayerNorm over channels, a layer's scale, and a norm before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.depthwise = nn.ModuleList(
            [nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH) for _ in range(2)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.wide = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2)])
        self.narrow = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)])
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for convolution, norm, wide, narrow in zip(
            self.depthwise, self.norms, self.wide, self.narrow, strict=True
        ):
            y = norm(convolution(x).permute(0, 2, 3, 1))
            x = x + (self.scale * narrow(F.gelu(wide(y)))).permute(0, 3, 1, 2)
        scores: Tensor = self.head(self.norm(x.mean((2, 3))))
        return scores


class GroupNormNet(nn.Module):
    """Wu & He 2018: GroupNorm, whose result is cut off before the next convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(4, WIDTH), nn.GroupNorm(4, WIDTH)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.first(x)))
        x = x + F.silu(self.norms[1](self.second(x)))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class RMSNorm(nn.Module):
    """Normalisation in float32, as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        full = x.to(torch.float32)
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * full.to(x.dtype)


class Rotary(nn.Module):
    """Su et al. 2021, as `transformers` writes it: without gradient and without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies", 1.0 / 100 ** (torch.arange(0, 8, 2).float() / 8), persistent=False
        )

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = (
            torch.as_tensor(self.frequencies)[None, :, None]
            .expand(positions.shape[0], -1, 1)
            .to(x.device)
        )
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = (frequencies.float() @ positions[:, None, :].float()).transpose(1, 2)
            angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Llama(nn.Module):
    """Touvron et al. 2023: positions and a causal mask made in forward, key-value heads shared, a
    gated MLP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(32, WIDTH), Rotary()
        self.norms = nn.ModuleList([RMSNorm() for _ in range(3)])
        self.query, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.key, self.value = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.down, self.head = nn.Linear(32, WIDTH, bias=False), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens)
        positions = torch.arange(length, device=tokens.device)[None]
        cosine, sine = self.rotary(x, positions)
        mask = torch.full((length, length), torch.finfo(x.dtype).min, device=x.device).triu(1)
        y = self.norms[0](x)
        query = self._turn(self.query(y).view(batch, length, 2, 8).transpose(1, 2), cosine, sine)
        key = self._turn(
            self.key(y).view(batch, length, 1, 8).transpose(1, 2), cosine, sine
        ).expand(-1, 2, -1, -1)
        value = self.value(y).view(batch, length, 1, 8).transpose(1, 2).expand(-1, 2, -1, -1)
        weights = F.softmax(
            query @ key.transpose(2, 3) / 8**0.5 + mask, -1, dtype=torch.float32
        ).to(query.dtype)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        scores: Tensor = self.head(self.norms[2](x))
        return scores

    @staticmethod
    def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]


class RelativePositions(nn.Module):
    """Raffel et al. 2020: attention with a learned bias per bucket of distances, computed in every
    forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bias = nn.Embedding(32, WIDTH), nn.Embedding(8, 2)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens)
        places = torch.arange(length, device=tokens.device)
        distance = (places[None] - places[:, None]).abs()
        far = 4 + (torch.log(distance.float().clamp(min=1) / 4) / math.log(4) * 4).to(torch.long)
        bucket = torch.where(distance < 4, distance, far.clamp(max=7))
        bias = self.bias(bucket).permute(2, 0, 1)[None]
        query, key, value = (
            self.qkv(self.norm(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        )
        weights = F.dropout((query @ key.transpose(2, 3) + bias).softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        scores: Tensor = self.head(F.layer_norm(x, (WIDTH,)))
        return scores


class MixtureOfExperts(nn.Module):
    """Shazeer et al. 2017: every token to the best two of four experts, weighted; all experts run
    on all tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, WIDTH, 8) / 4),
            nn.Parameter(torch.randn(4, 8, WIDTH) / 4),
        )
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        chances = self.router(x).softmax(-1)
        best, chosen = chances.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        shares = torch.zeros_like(chances).scatter(-1, chosen, best)
        hidden = torch.einsum("btw,ewh->bteh", x, self.up)
        made = torch.einsum("bteh,ehw->btew", F.gelu(hidden), self.down)
        scores: Tensor = self.head(x + (made * shares[..., None]).sum(2))
        return scores


class Seq2Seq(nn.Module):
    """Cho et al. 2014: a bidirectional GRU reads, another one writes from its state; an Elman
    network after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(32, WIDTH), nn.Embedding(32, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(2 * WIDTH, WIDTH)
        self.writer = nn.GRU(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)
        self.plain = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, state = self.reader(self.source(source))
        first = torch.tanh(self.bridge(torch.cat([state[0], state[1]], 1)))
        written, _ = self.writer(self.target(target), first[None].repeat(2, 1, 1))
        written, _ = self.plain(written + self.bridge(read.mean(1))[:, None])
        scores: Tensor = self.head(written)
        return scores


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021: patches, a class token, learned positions, blocks of
    nn.TransformerEncoderLayer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        scores: Tensor = self.head(self.encoder(x)[:, 0])
        return scores


class Translator(nn.Module):
    """Vaswani et al. 2017: nn.Transformer with its causal mask, and sines as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        made = self.body(
            self._placed(source), self._placed(target), tgt_mask=mask, tgt_is_causal=True
        )
        scores: Tensor = self.head(made)
        return scores

    def _placed(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        rates = torch.exp(
            torch.arange(0, WIDTH, 2, device=tokens.device) * (-math.log(100.0) / WIDTH)
        )
        waves = torch.stack([torch.sin(places * rates), torch.cos(places * rates)], 2).flatten(1)
        placed: Tensor = self.embedding(tokens) + waves
        return placed


class Diffusion(nn.Module):
    """Ho et al. 2020: a U-Net that gets the time step as sines, attends at the bottom, and predicts
    the noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.enter, self.down = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.leave = nn.Conv2d(2 * WIDTH, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        half = WIDTH // 2
        rates = torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        angles = step[:, None].float() * rates[None]
        scale, shift = self.time(torch.cat([angles.cos(), angles.sin()], 1))[
            :, :, None, None
        ].chunk(2, 1)
        entered = self.enter(x)
        y = self.norm(self.down(entered)) * (1 + scale) + shift
        flat = F.silu(y).flatten(2).transpose(1, 2)
        y = y + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(y)
        made: Tensor = self.leave(
            torch.cat([F.interpolate(y, scale_factor=2.0, mode="nearest"), entered], 1)
        )
        return made


class Segmentation(nn.Module):
    """Chen et al. 2017: dilated convolutions with BatchNorm, squeeze and excitation, bilinear
    upsampling.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.wide = nn.Conv2d(WIDTH, WIDTH, 3, padding=2, dilation=2)
        self.squeeze, self.excite = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.head = nn.Conv2d(WIDTH, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = F.hardswish(self.wide(x))
        weights = torch.sigmoid(
            self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1).flatten(1))))
        )
        scores: Tensor = F.interpolate(
            self.head(x * weights[:, :, None, None]), size, mode="bilinear"
        )
        return scores


class Tags(nn.Module):
    """Several labels for a text: a learned pooling by softmax, constants, and float64 in
    between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.score, self.head = (
            nn.Embedding(32, WIDTH),
            nn.Linear(WIDTH, 1),
            nn.Linear(WIDTH, 6),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            counts = torch.tensor([1.0, 2.0, 4.0], device=x.device).cumsum(0).double()
            decay = torch.exp(-torch.arange(tokens.shape[1], device=x.device) / counts.sum())
        shares = (self.score(x).squeeze(2) + decay.to("cpu").float()).softmax(1)
        pooled = (x * shares[:, :, None]).sum(1)
        scores: Tensor = self.head(F.normalize(pooled, dim=1) + F.softplus(pooled))
        return scores


class Speech(nn.Module):
    """Graves et al. 2006: convolutions over time, then log-probabilities of labels per frame."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv1d(8, WIDTH, 3, padding=1),
            nn.Conv1d(WIDTH, WIDTH, 3, 2, 1),
        )
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm(self.first(x)))
        x = F.prelu(self.second(x), torch.full((1,), 0.25, device=x.device))
        return F.log_softmax(self.head(x.transpose(1, 2)), 2)


def _alignment(scores: Tensor, target: Tensor) -> Tensor:
    """Return the loss of all alignments of frames to labels in order, as CTC's without blanks."""
    emitted = scores.gather(2, target[:, None].expand(-1, scores.shape[1], -1))
    reached = F.pad(emitted[:, 0, :1], (0, target.shape[1] - 1), value=-1e4)
    for frame in range(1, scores.shape[1]):
        moved = F.pad(reached[:, :-1], (1, 0), value=-1e4)
        reached = torch.logaddexp(reached, moved) + emitted[:, frame]
    return -reached[:, -1].mean()


def _images(batch_size: int) -> Batch:
    return Batch((torch.randn(batch_size, 3, 8, 8),), {}, torch.randint(0, 10, (batch_size,)))


def _pixels(batch_size: int) -> Batch:
    return Batch((torch.randn(batch_size, 3, 8, 8),), {}, torch.randint(0, 5, (batch_size, 8, 8)))


def _noise(batch_size: int) -> Batch:
    images = torch.randn(batch_size, 3, 8, 8)
    return Batch(
        (images, torch.randint(0, 100, (batch_size,))), {}, torch.randn(batch_size, 3, 8, 8)
    )


def _tokens(batch_size: int) -> Batch:
    tokens = torch.randint(0, 32, (batch_size, 9))
    return Batch((tokens[:, :-1],), {}, tokens[:, 1:])


def _pairs(batch_size: int) -> Batch:
    target = torch.randint(0, 32, (batch_size, 7))
    return Batch((torch.randint(0, 32, (batch_size, 8)), target[:, :-1]), {}, target[:, 1:])


def _labelled(batch_size: int) -> Batch:
    return Batch(
        (torch.randint(0, 32, (batch_size, 8)),), {}, torch.randint(0, 2, (batch_size, 6)).float()
    )


def _sounds(batch_size: int) -> Batch:
    return Batch((torch.randn(batch_size, 8, 12),), {}, torch.randint(0, 5, (batch_size, 3)))


def _per_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


DEVICE_MODELS = {
    "convnext": Case(ConvNeXt, _images, F.cross_entropy),
    "group norm": Case(GroupNormNet, _images, F.cross_entropy),
    "llama": Case(Llama, _tokens, _per_token),
    "relative positions": Case(RelativePositions, _tokens, _per_token),
    "mixture of experts": Case(MixtureOfExperts, _tokens, _per_token),
    "seq2seq": Case(Seq2Seq, _pairs, _per_token),
    "vision transformer": Case(VisionTransformer, _images, F.cross_entropy),
    "translator": Case(Translator, _pairs, _per_token),
    "diffusion": Case(Diffusion, _noise, F.mse_loss),
    "segmentation": Case(Segmentation, _pixels, F.cross_entropy),
    "tags": Case(Tags, _labelled, F.binary_cross_entropy_with_logits),
    "speech": Case(Speech, _sounds, _alignment),
}
