"""Layers divided over ranks, estimated from the model of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import InputError, PlanError
from planner.model.spec import TrainingSpec
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile

WIDTH, HEAD, BATCH, TOKENS = 64, 8, 4, 16
HIDDEN_BYTES = 4 * BATCH * TOKENS * WIDTH


class Block(nn.Module):
    """Attention with fewer heads for keys than for queries, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, size, bias=False) for size in (WIDTH, WIDTH // 2, WIDTH // 2)
        )
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = self.norm(x + self.o(y.transpose(1, 2).flatten(2)))
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


PLAN = {
    "embedding": "embedding_rowwise",
    **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("o", "down")},
    "head": "colwise_rep",
}


def spec(**more: Any) -> TrainingSpec:
    def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
        tokens = torch.zeros(batch_size, TOKENS, dtype=torch.long)
        return (tokens,), tokens

    functions: dict[str, Any] = {
        "build_model": Model,
        "example_batch": example_batch,
        "loss": _loss,
    }
    return TrainingSpec("model", functions | more)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def options(*tensor: int) -> EstimateOptions:
    return EstimateOptions("a100", tensor=tensor)


def test_a_rank_has_its_part_of_what_is_divided_and_all_of_the_rest() -> None:
    whole = estimate_profile(spec(tensor_parallel_plan=lambda: PLAN), BATCH, options(2, 4))
    assert whole.tensor is not None
    assert [costs.degree for costs in whole.tensor] == [2, 4]
    for costs in whole.tensor:
        held = dict(zip((layer.name for layer in whole.layers), costs.weight_bytes, strict=True))
        of_one = {layer.name: layer.weight_bytes for layer in whole.layers}
        assert held["blocks.0.q"] * costs.degree == of_one["blocks.0.q"]
        assert held["embedding"] * costs.degree == of_one["embedding"]
        assert held["head"] * costs.degree == of_one["head"]
        assert held["blocks.1.norm"] == of_one["blocks.1.norm"]
        # A row-wise product's bias is added once the outputs are summed.
        assert held["blocks.0.o"] == (of_one["blocks.0.o"] - 4 * WIDTH) / costs.degree + 4 * WIDTH
        # The embedding's, and those of two products per block; and of two inputs per block, one of
        # three products. The head's outputs are gathered, which is half an all-reduce, and its
        # input's gradient is summed up.
        logits_bytes = HIDDEN_BYTES // WIDTH * 128
        assert sum(costs.forward_reduced_bytes) == (1 + 2 * 2) * HIDDEN_BYTES + logits_bytes // 2
        assert sum(costs.backward_reduced_bytes) == (2 * 2 + 1) * HIDDEN_BYTES
        assert sum(costs.backward_reduces) == 5


class Packed(Block):
    """The block with query, key and value from one product, whose sizes it names."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.k, self.v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.view(-1, TOKENS, 8, HEAD).transpose(1, 2)
            for each in self.qkv(x).split(WIDTH, dim=2)
        )
        y = (
            nn.functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(-1, TOKENS, WIDTH)
        )
        x = self.norm(x + self.o(y))
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def test_a_rank_has_its_heads_of_a_product_that_makes_query_key_and_value() -> None:
    class PackedModel(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Packed() for _ in range(2))

    whole = estimate_profile(spec(build_model=PackedModel), BATCH, options(2, 4, 8))
    assert whole.tensor is not None
    for costs in whole.tensor:
        for place, layer in enumerate(whole.layers):
            if layer.name == "blocks.1.qkv":
                assert costs.weight_bytes[place] * costs.degree == layer.weight_bytes
        assert sum(costs.saved_bytes) < sum(layer.saved_bytes for layer in whole.layers)
        assert sum(costs.forward_reduces) == 1 + 2 * 2
        assert sum(costs.backward_reduced_bytes) == 2 * 2 * HIDDEN_BYTES


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(
        InputError,
        match="does not say how its layers are sharded, and nothing was found that 3 ranks",
    ):
        estimate_profile(spec(), BATCH, options(3))
    with pytest.raises(PlanError, match="3 ranks cannot shard the"):
        estimate_profile(spec(tensor_parallel_plan=lambda: PLAN), BATCH, options(3))
