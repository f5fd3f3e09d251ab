"""GPT and Llama as Megatron-like programs run them, described by a few numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from planner.model.spec import TrainingSpec


@dataclass(frozen=True)
class Gpt:
    """A transformer that predicts tokens.

    Attributes:
        name: of the model.
        layers, hidden, heads, ffn, vocab, seq: its sizes; ffn is the hidden width of the MLP.
        dropout: in attention, after both parts of a layer, and after the embedding.
        biases: whether linear layers have them.
        gated: the MLP multiplies by a gate (SwiGLU), norms are RMS norms and positions are rotary,
            as in Llama.
        flash: attention is one fused kernel.
        half_loss: the loss is in the precision of the weights, and not in single.
        key_heads: heads of keys and values, of which several heads of queries share each; None: as
            many as `heads`.
        tensor: ranks that divide heads, MLP and vocabulary between them, as Megatron does; this is
            one of them.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    dropout: float = 0.0
    biases: bool = True
    gated: bool = False
    flash: bool = False
    half_loss: bool = False
    key_heads: int | None = None
    tensor: int = 1

    def training_spec(self) -> TrainingSpec:
        """Return the model with its loss, AdamW and batches of random tokens."""
        functions: dict[str, Any] = {
            "build_model": lambda: _Model(self),
            "example_batch": self._batch,
            "loss": _half_loss if self.half_loss else _loss,
            "optimizer": _optimizer,
        }
        return TrainingSpec(self.name, functions)

    def _batch(self, batch_size: int) -> tuple[tuple[Tensor], Tensor]:
        tokens = torch.zeros(batch_size, self.seq, dtype=torch.long)
        return (tokens,), tokens


def _loss(output: Tensor, target: Tensor) -> Tensor:
    # Megatron's loss is in single precision.
    return F.cross_entropy(output.flatten(0, 1).float(), target.t().flatten())


def _half_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.t().flatten())


def _optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=1e-4, fused=True)


def norm(gpt: Gpt) -> nn.Module:
    return nn.RMSNorm(gpt.hidden, eps=1e-5) if gpt.gated else nn.LayerNorm(gpt.hidden)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _heads(gpt: Gpt) -> tuple[int, int, int]:
    keys = gpt.heads if gpt.key_heads is None else gpt.key_heads
    return gpt.heads, keys, keys


class _Attention(nn.Module):
    """Causal self-attention, (tokens, batch, width) -> the same: in Megatron's layout, heads need
    no copies.
    """

    mask: Tensor
    nothing: Tensor
    cosine: Tensor
    sine: Tensor

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.gpt = gpt
        self.widths = [gpt.hidden // gpt.heads * heads // gpt.tensor for heads in _heads(gpt)]
        self.qkv = nn.Linear(gpt.hidden, sum(self.widths), bias=gpt.biases)
        self.dense = nn.Linear(gpt.hidden // gpt.tensor, gpt.hidden, bias=gpt.biases)
        self.register_buffer("mask", torch.ones(gpt.seq, gpt.seq, dtype=torch.bool).triu(1))
        self.register_buffer("nothing", torch.zeros(1, 1, 1))
        self.register_buffer("cosine", torch.zeros(gpt.seq, 1, 1, gpt.hidden // gpt.heads))
        self.register_buffer("sine", torch.zeros(gpt.seq, 1, 1, gpt.hidden // gpt.heads))

    def forward(self, x: Tensor) -> Tensor:
        gpt, (tokens, batch, width) = self.gpt, x.shape
        depth, heads = width // gpt.heads, gpt.heads // gpt.tensor
        if gpt.key_heads is None:
            q, k, v = self.qkv(x).view(tokens, batch, heads, 3 * depth).chunk(3, dim=-1)
        else:
            q, k, v = (
                part.unflatten(-1, (-1, depth)) for part in self.qkv(x).split(self.widths, dim=-1)
            )
        if gpt.gated:
            q, k = _rotated(q, self.cosine, self.sine), _rotated(k, self.cosine, self.sine)
        dropout = gpt.dropout if self.training else 0.0
        if gpt.flash:
            q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
            shared = gpt.key_heads is not None
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=shared
            )
        else:
            q, k, v = (
                part.view(tokens, batch * heads, depth).transpose(0, 1) for part in (q, k, v)
            )
            scores = torch.baddbmm(
                self.nothing, q, k.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(depth)
            ).view(batch, heads, tokens, tokens)
            weights = torch.softmax(scores.masked_fill(self.mask, -10000.0), dim=-1)
            weights = F.dropout(weights, dropout).view(batch * heads, tokens, tokens)
            y = torch.bmm(weights, v).view(batch, heads, tokens, depth)
        result: Tensor = self.dense(y.permute(2, 0, 1, 3).reshape(tokens, batch, heads * depth))
        return result


class _Mlp(nn.Module):
    """Two linear layers with a GELU between them, or three with a gate."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        ffn = gpt.ffn // gpt.tensor
        self.gate = nn.Linear(gpt.hidden, ffn, bias=gpt.biases) if gpt.gated else None
        self.up = nn.Linear(gpt.hidden, ffn, bias=gpt.biases)
        self.down = nn.Linear(ffn, gpt.hidden, bias=gpt.biases)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (
            F.gelu(self.up(x), approximate="tanh")
            if self.gate is None
            else F.silu(self.gate(x)) * self.up(x)
        )
        result: Tensor = self.down(hidden)
        return result


class Layer(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(gpt), norm(gpt)
        self.attention, self.mlp = _Attention(gpt), _Mlp(gpt)
        self.dropout1, self.dropout2 = nn.Dropout(gpt.dropout), nn.Dropout(gpt.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        result: Tensor = x + self.dropout2(self.mlp(self.norm2(x)))
        return result


class _Embedding(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(gpt.vocab // gpt.tensor, gpt.hidden)
        self.positions = None if gpt.gated else nn.Embedding(gpt.seq, gpt.hidden)
        self.register_buffer("numbers", torch.arange(gpt.seq))
        self.dropout = nn.Dropout(gpt.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(self.numbers)
        result: Tensor = self.dropout(x.transpose(0, 1).contiguous())
        return result


class _Model(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.embedding = _Embedding(gpt)
        self.layers = nn.ModuleList(Layer(gpt) for _ in range(gpt.layers))
        self.norm = norm(gpt)
        self.head = nn.Linear(gpt.hidden, gpt.vocab // gpt.tensor, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result
