"""A Llama as nanotron runs it: one of several ranks that divide its layers, with the operations of
its code.

The source is huggingface/nanotron (Apache-2.0): `models/llama.py`,
`parallel/tensor_parallel/functional.py`, and the kernels of flash-attn that it calls. Collectives
compute nothing here; `nanotron` adds their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Llama:
    """Sizes of a model, and how many ranks divide it.

    Attributes:
        layers, hidden, heads, ffn, vocab, seq: as in `gpt.Gpt`.
        tensor: ranks that divide heads, MLP, vocabulary and, between products, tokens.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    tensor: int = 1

    def blocks(self, samples: int) -> dict[str, tuple[nn.Module, Tensor]]:
        """Return a block of each kind with what goes into it; all are in bfloat16."""
        half = torch.bfloat16
        hidden = torch.empty(
            self.seq // self.tensor, samples, self.hidden, dtype=half, requires_grad=True
        )
        logits = torch.empty(
            self.seq, samples, self.vocab // self.tensor, dtype=half, requires_grad=True
        )
        tokens = torch.zeros(samples, self.seq, dtype=torch.long)
        kinds = (
            ("embedding", _Embedding, tokens),
            ("layer", _Layer, hidden),
            ("head", _Head, hidden),
        )
        blocks: dict[str, tuple[nn.Module, Tensor]] = {
            name: (kind(self), x) for name, kind, x in kinds
        }
        return blocks | {"loss": (_Loss(), logits)}


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _by_shards(rows: Tensor, weight: Tensor, tensor: int) -> None:
    """Multiply the rank's own tokens while the others' arrive, and then those before and after
    them.
    """
    before = tensor // 2
    for shards in (1, before, tensor - before - 1):
        if shards:
            torch.mm(rows.new_empty(shards * rows.shape[0], rows.shape[1]), weight)


class _Column(torch.autograd.Function):
    """All-gathers tokens, and multiplies them by a part of the columns: (s/t, b, h) -> (s,
    b, n/t).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tensor: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        _by_shards(x.reshape(-1, x.shape[-1]), weight.t(), tensor)
        return x.new_empty(x.shape[0] * tensor, x.shape[1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        torch.mm(rows, weight)
        return (
            x.new_empty(x.shape),
            torch.mm(rows.t(), x.new_empty(rows.shape[0], x.shape[-1])),
            None,
        )


class _Row(torch.autograd.Function):
    """Multiplies by a part of the rows, and reduce-scatters tokens: (s, b, n/t) -> (s/t, b, h)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tensor: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tensor = tensor
        torch.mm(x.reshape(-1, x.shape[-1]), weight.t())
        return x.new_empty(x.shape[0] // tensor, x.shape[1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        _by_shards(gradient.reshape(-1, gradient.shape[-1]), weight, ctx.tensor)
        rows = x.reshape(-1, x.shape[-1])
        return (
            x.new_empty(x.shape),
            torch.mm(gradient.new_empty(gradient.shape[-1], rows.shape[0]), rows),
            None,
        )


class _Rotary(torch.autograd.Function):
    """One kernel each way, which turns a tensor in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.0


class _CrossEntropy(torch.autograd.Function):
    """nanotron's cross-entropy of divided logits: (s, b, v/t), (s, b) -> (s, b)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        largest = torch.max(logits, dim=-1)[0]
        logits = logits - largest.unsqueeze(-1)
        outside = (target < 0) | (target >= logits.shape[-1])
        inside = (target.clone() - 0).masked_fill_(outside, 0).view(-1)
        numbers = torch.arange(inside.shape[0], device=logits.device)
        predicted = logits.view(-1, logits.shape[-1])[numbers, inside].clone().view_as(target)
        predicted.masked_fill_(outside, 0.0)
        exponentials = torch.exp(logits, out=logits)
        total = exponentials.sum(dim=-1)
        loss = torch.log(total) - predicted
        exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponentials, outside, inside)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, outside, inside = ctx.saved_tensors
        rows = softmax.view(-1, softmax.shape[-1])
        numbers = torch.arange(inside.shape[0], device=rows.device)
        rows[numbers, inside] -= 1.0 - outside.view(-1).float()
        return softmax.mul_(gradient.unsqueeze(-1)), None


class _Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = _weight(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class _Layer(nn.Module):
    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.llama, part, h = llama, llama.hidden // llama.tensor, llama.hidden
        self.norm1, self.norm2 = _Norm(h), _Norm(h)
        self.qkv, self.dense = _weight(3 * part, h), _weight(h, part)
        ffn = llama.ffn // llama.tensor
        self.gate_up, self.down = _weight(2 * ffn, h), _weight(h, ffn)

    def forward(self, x: Tensor) -> Tensor:
        tensor = self.llama.tensor
        x = x + _apply(_Row, self._attention(self.norm1(x)), self.dense, tensor)
        gate, up = _apply(_Column, self.norm2(x), self.gate_up, tensor).chunk(2, dim=-1)
        result: Tensor = x + _apply(_Row, F.silu(gate) * up, self.down, tensor)
        return result

    def _attention(self, x: Tensor) -> Tensor:
        llama = self.llama
        heads, depth = llama.heads // llama.tensor, llama.hidden // llama.heads
        qkv = _apply(_Column, x, self.qkv, llama.tensor)
        tokens, batch, _ = qkv.shape
        q, k, v = qkv.view(tokens, batch, 3, heads, depth).permute(2, 1, 0, 3, 4).contiguous()
        kv = torch.cat((k.unsqueeze(0), v.unsqueeze(0))).permute(1, 2, 0, 3, 4).contiguous()
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=x.device)
        for _ in ("queries", "keys"):  # where samples begin
            torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
            mask.sum(-1, dtype=torch.int32).cumsum(0)
        k, v = _apply(_Rotary, kv[:, :, 0]), kv[:, :, 1]
        q, k, v = (each.transpose(1, 2) for each in (_apply(_Rotary, q), k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, tokens, heads * depth).transpose(0, 1)


class _Embedding(nn.Module):
    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.tensor = llama.tensor
        self.weight = _weight(llama.vocab // llama.tensor, llama.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.transpose(0, 1)
        outside = (tokens < 0) | (tokens >= self.weight.shape[0])
        x = F.embedding((tokens.clone() - 0).masked_fill_(outside, 0), self.weight)
        if self.tensor == 1:
            return x
        x = x.masked_fill(outside.unsqueeze(-1), 0.0)
        return _apply(_Scatter, x, self.tensor)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(x.shape[0] // tensor, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape), None


class _Head(nn.Module):
    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.tensor, self.norm = llama.tensor, _Norm(llama.hidden)
        self.weight = _weight(llama.vocab // llama.tensor, llama.hidden)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _apply(_Column, self.norm(x), self.weight, self.tensor)
        return result


class _Loss(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        target = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
        result: Tensor = _apply(_CrossEntropy, logits.float(), target)
        return result
