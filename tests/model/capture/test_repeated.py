"""A graph written from a few of a model's equal blocks is the one that the tracer makes of all:
name by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec

WIDTH, BLOCKS = 8, 8


class Block(nn.Module):
    """A block with a norm, a buffer, dropout and a number of its own."""

    scale: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.act = number, partial(F.gelu, approximate="tanh")
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        made: Tensor = self.down(self.act(self.up(self.norm(x)))) * self.scale
        dropped: Tensor = self.drop(made.reshape(batch * 3, WIDTH))
        return x + dropped.view(batch, 3, WIDTH)


class Model(nn.Module):
    """Blocks between two products, of which the second reads what was before the blocks, too."""

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(number) for number in range(BLOCKS))
        self.more = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = known = self.first(x)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.last(self.more(x + known)) + x.mean()
        return made


class Reversed(Model):
    """The list that was made first runs last."""

    def __init__(self) -> None:
        super().__init__()
        blocks, self.blocks = self.blocks, nn.ModuleList()
        del self.blocks
        self.blocks = blocks


class FirstDiffers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up, self.blocks[0].down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class OneDiffers(Model):
    """One block far from both ends has another size inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[6].up, self.blocks[6].down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )


class OneDrops(Model):
    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.drop = nn.Dropout(0.1 * number)


class Alternating(Model):
    """Each second block reads what the last but one made."""

    def forward(self, x: Tensor) -> Tensor:
        before = x = self.first(x)
        for number, block in enumerate(self.blocks):
            before, x = x, block(x + before if number % 2 else x)
        made: Tensor = self.last(x)
        return made


class Collecting(Model):
    """The output has what every block made."""

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for block in self.blocks:
            values.append(block(values[-1]))
        return torch.stack(values).mean(0)


class Reading(Model):
    """All blocks read what the third one made."""

    def forward(self, x: Tensor) -> Tensor:
        x, third = self.first(x), None
        for number, block in enumerate(self.blocks):
            x = block(x if third is None else x + third)
            third = x if number == 2 else third
        made: Tensor = self.last(x)
        return made


class Counting(Model):
    """It asks for its blocks by their numbers, of which a shorter list lacks some."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(BLOCKS):
            x = self.blocks[number](x)
        made: Tensor = self.last(x)
        return made


def spec_of(build: Callable[[], nn.Module]) -> TrainingSpec:
    x = torch.randn(4, 3, WIDTH)
    return planner.in_memory(build(), example_batch=((x,), x), loss=F.mse_loss)


def both(spec: TrainingSpec, **options: Any) -> tuple[LayerGraph, LayerGraph]:
    model, batch = spec.build_model(), spec.example_batch(4)
    return tuple(
        capture_file(spec, batch, model, quickly=quickly, **options) for quickly in (False, True)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("build", "lists"),
    [
        (Model, {"blocks", "more"}),
        (Reversed, {"blocks", "more"}),
        (FirstDiffers, {"blocks", "more"}),
        (Tied, {"blocks", "more"}),
        (OneDiffers, {"more"}),
        (OneDrops, {"more"}),
        (Alternating, set()),
        (Collecting, set()),
        (Reading, set()),
        (Counting, set()),
    ],
)
def test_the_graph_is_that_of_all_blocks(build: type[Model], lists: set[str]) -> None:
    """The same hash: operations, their names and arguments, weights, shapes and layers."""
    spec = spec_of(build)
    whole, quick = both(spec)
    assert set(quick.repeated) == lists
    assert quick.hash == whole.hash
    assert set(quick.edges) == set(whole.edges)
    assert len(spec.build_model().get_submodule("blocks")._modules) == BLOCKS


def test_it_computes_what_all_blocks_compute() -> None:
    whole, quick = both(spec_of(Model), training=False)
    x = torch.randn(4, 3, WIDTH)
    assert torch.equal(quick.module((x,), {}, x)[0], whole.module((x,), {}, x)[0])


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("GPT2LMHeadModel", True),
        ("LlamaForCausalLM", True),
        ("MixtralForCausalLM", True),
        ("Gemma2ForCausalLM", False),
    ],
)
def test_models_of_transformers(name: str, *, short: bool) -> None:
    import transformers

    made = getattr(transformers, name)
    config = made.config_class()
    for field, size in {
        "hidden_size": 32,
        "n_embd": 32,
        "num_hidden_layers": 8,
        "n_layer": 8,
        "n_head": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 50,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }.items():
        if hasattr(config, field):
            setattr(config, field, size)
    config.use_cache = False
    tokens = torch.randint(3, 50, (4, 6))
    spec = planner.in_memory(
        made(config), example_batch=((), {"input_ids": tokens, "labels": tokens}, None)
    )
    whole, quick = both(spec)
    assert bool(quick.repeated) == short
    assert quick.hash == whole.hash
