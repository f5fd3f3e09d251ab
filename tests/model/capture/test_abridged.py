"""Which of a model's blocks do the same, so that one stands for others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.model.batch import Batch
from planner.model.capture.abridged import abridged
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LOSS, LayerGraph, graph_digest
from planner.model.stage.stage import build_stage

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
    """Two lists of blocks between products; what was before the first is added before the
    second.
    """

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(number) for number in range(BLOCKS))
        self.more = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = known = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.middle(x)
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


class OneIsFrozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].requires_grad_(requires_grad=False)


class Alternating(Model):
    """Each second block reads what the last but one made."""

    def forward(self, x: Tensor) -> Tensor:
        before = x = self.first(x)
        for number, block in enumerate(self.blocks):
            before, x = x, block(x + before if number % 2 else x)
        made: Tensor = self.last(self.middle(x))
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
        made: Tensor = self.last(self.middle(x))
        return made


class Counting(Model):
    """It asks for its blocks by their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(BLOCKS):
            x = self.blocks[number](x)
        made: Tensor = self.last(self.middle(x))
        return made


def graph_of(model: nn.Module, *, training: bool = True) -> LayerGraph:
    x = torch.randn(4, 3, WIDTH)
    spec = planner.in_memory(model, example_batch=((x,), x), loss=F.mse_loss)
    return capture_file(spec, spec.example_batch(4), model, training=training)


@contextmanager
def _abridged_names(graph: LayerGraph) -> Iterator[set[str]]:
    """Give the paths of the blocks that are left out."""
    with abridged(graph) as (shorter, stands):
        assert len(stands) == len(graph.layers)
        kept = {layer.name for layer in shorter.layers}
        left_out = (layer.name for layer in graph.layers if layer.name not in kept)
        yield {".".join(name.split(".")[:2]) for name in left_out}


@pytest.mark.parametrize(
    ("build", "lists"),
    [
        (Model, {"blocks", "more"}),
        (Reversed, {"blocks", "more"}),
        (FirstDiffers, {"blocks", "more"}),
        (Counting, {"blocks"}),
        (Tied, {"blocks", "more"}),
        (OneDiffers, {"more"}),
        (OneDrops, {"more"}),
        (OneIsFrozen, {"more"}),
        (Collecting, set()),
        (Reading, set()),
    ],
)
def test_blocks_that_do_the_same_are_left_out(build: type[Model], lists: set[str]) -> None:
    """The first four stay, and the last: of eight, the fifth to the seventh go."""
    graph = graph_of(build())
    with _abridged_names(graph) as left_out:
        assert left_out == {f"{path}.{number}" for path in lists for number in (4, 5, 6)}


def test_of_blocks_that_are_equal_in_turn_as_many_stay_as_a_turn_has() -> None:
    """Of eight, the fourth stands for the sixth, and the fifth for the seventh, which the last one
    follows.
    """
    graph = graph_of(Alternating())
    with abridged(graph) as (shorter, stands):
        found = {
            layer.name.split(".")[1]: shorter.layers[stand].name.split(".")[1]
            for layer, stand in zip(graph.layers, stands, strict=True)
            if layer.name.startswith("blocks.")
        }
    assert found == {**{str(n): str(n) for n in range(8)}, "5": "3", "6": "4"}


def test_the_graph_is_as_it_was_afterwards() -> None:
    graph = graph_of(Model())
    before = graph_digest(graph, graph.specs)
    edges = graph.edges
    with abridged(graph) as (shorter, _):
        assert len(shorter.layers) < len(graph.layers)
        assert graph_digest(graph, graph.specs) != before
    assert graph_digest(graph, graph.specs) == before
    assert dataclasses.replace(graph).edges == edges


def test_what_is_left_computes_what_a_model_without_the_others_does() -> None:
    """Five blocks of eight, with the weights of these."""
    model, x = Model(), torch.randn(4, 3, WIDTH)
    for blocks in (model.blocks, model.more):
        for block in blocks:
            for weight in block.parameters():
                nn.init.normal_(weight)
    graph = graph_of(model, training=False)
    with abridged(graph) as (shorter, _):
        stage = build_stage(shorter, [layer.name for layer in shorter.layers])
        found = stage(Batch((x,), {}, x), {})[LOSS]

    for blocks in (model.blocks, model.more):
        del blocks[4:7]
    with torch.no_grad():
        assert torch.equal(found, F.mse_loss(model.eval()(x), x))


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("GPT2LMHeadModel", True),
        ("LlamaForCausalLM", True),
        ("MixtralForCausalLM", True),
        ("Gemma2ForCausalLM", True),
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
    with _abridged_names(capture_file(spec, spec.example_batch(4))) as left_out:
        assert bool(left_out) == short
