"""What ranks can divide is found in the graph, and is what the model file says itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import load_model_file
from planner.model.tensor.parallel_plan import found_plan, style_of
from tests.executor.models import write_model

WIDTH, HEADS = 16, 4


def graph_of(model: nn.Module) -> LayerGraph:
    x = torch.randn(3, 5, WIDTH)
    spec = planner.in_memory(model, example_batch=((x,), x), loss=F.mse_loss)
    return capture_file(spec, spec.example_batch(3))


class Calls(nn.ModuleDict):
    """Modules by name, and what they compute."""

    def __init__(self, compute: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__(modules)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def test_it_is_what_the_model_file_says(tmp_path: Path) -> None:
    """Attention by heads, a gated product, and the embedding; four ranks do not divide two
    key-value heads.

    A product whose outputs are gathered is divided where the model says so.
    """
    spec = load_model_file(write_model(tmp_path, "attention", "sgd"))
    graph = capture_file(spec, spec.example_batch(4))
    said = spec.tensor_parallel_plan()
    modules = [name for name, _ in graph.model.named_modules() if style_of(said, name) is not None]
    for degree, kept in ((2, ()), (4, ("key", "value"))):
        expected = {
            name: style_of(said, name)
            for name in modules
            if name.rpartition(".")[2] not in (*kept, "head")
        }
        assert found_plan(graph, degree) == expected


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, WIDTH // HEADS).transpose(1, 2)


def stacked(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)


# Ways to take query, key and value from one product.
PACKED: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
    "split, as in nanoGPT": lambda x: map(heads, torch.split(x, WIDTH, dim=2)),
    "chunk": lambda x: map(heads, x.chunk(3, -1)),
    "unbind, as in timm": lambda x: stacked(x).permute(2, 0, 3, 1, 4).unbind(0),
    "index": lambda x: [stacked(x).permute(2, 0, 3, 1, 4)[place] for place in range(3)],
    "unflatten": lambda x: (
        each.transpose(1, 2) for each in torch.unflatten(x, -1, (3, HEADS, -1)).unbind(2)
    ),
    "slices": lambda x: map(heads, (x[..., :WIDTH], x[..., WIDTH : 2 * WIDTH], x[..., -WIDTH:])),
    "by heads": lambda x: (
        each.transpose(1, 2) for each in x.view(*x.shape[:2], HEADS, -1).chunk(3, -1)
    ),
}


@pytest.mark.parametrize("way", PACKED)
def test_query_key_and_value_of_one_product(way: str) -> None:
    """Three ranks would divide the three of them, and not the heads."""

    def attend(own: nn.ModuleDict, x: Tensor) -> Tensor:
        q, k, v = PACKED[way](own["qkv"](x))
        made: Tensor = own["out"](
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        )
        return made

    graph = graph_of(Calls(attend, qkv=linear(WIDTH, 3 * WIDTH), out=linear()))
    for degree, expected in ((2, {"qkv": "colwise", "out": "rowwise"}), (3, {}), (8, {})):
        assert found_plan(graph, degree) == expected


def test_a_gated_product_that_makes_both_at_once() -> None:
    """It is divided by its halves, if nothing reads both together."""

    def gated(own: nn.ModuleDict, x: Tensor) -> Tensor:
        gate, up = own["both"](x).chunk(2, -1)
        made: Tensor = own["down"](F.silu(gate) * up)
        return made

    def used_whole(own: nn.ModuleDict, x: Tensor) -> Tensor:
        made: Tensor = gated(own, x) + own["both"](x).softmax(-1).sum()
        return made

    def scaled_whole(own: nn.ModuleDict, x: Tensor) -> Tensor:
        gate, up = (own["both"](x) * torch.linspace(0.0, 1.0, 2 * WIDTH)).chunk(2, -1)
        made: Tensor = own["down"](F.silu(gate) * up)
        return made

    def found(compute: Callable[..., Tensor]) -> dict[str, str]:
        return found_plan(graph_of(Calls(compute, both=linear(WIDTH, 2 * WIDTH), down=linear())), 2)

    assert found(gated) == {"both": "colwise", "down": "rowwise"}
    assert found(used_whole) == found(scaled_whole) == {}


def rotated(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (
        x * 0.5
        + torch.cat((-second, first), dim=-1) * torch.linspace(0.0, 1.0, x.shape[-2])[:, None]
    )


def test_attention_that_is_written_out() -> None:
    """With positions that turn queries and keys, as Llama's do."""

    def attend(own: nn.ModuleDict, x: Tensor) -> Tensor:
        q, k, v = (own[name](x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for name in "qkv")
        q, k = rotated(q), rotated(k)
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        made: Tensor = x + own["out"]((weights @ v).permute(0, 2, 1, 3).reshape(x.shape))
        return made

    model = Calls(attend, q=linear(), k=linear(), v=linear(), out=linear())
    assert found_plan(graph_of(model), 4) == dict.fromkeys("qkv", "colwise") | {"out": "rowwise"}
    assert found_plan(graph_of(model), 8) == {}  # there are four heads


def test_what_ends_in_no_sum_stays_whole() -> None:
    """A residual meets a divided value, a norm sees all features, and the last product makes the
    model's output.
    """

    def compute(own: nn.ModuleDict, x: Tensor) -> Tensor:
        x = own["down"](F.gelu(own["up"](x)))
        x = x + own["residual"](x)
        made: Tensor = own["last"](F.layer_norm(own["normed"](x), (WIDTH,)))
        return made

    names = ("up", "down", "residual", "normed", "last")
    found = found_plan(graph_of(Calls(compute, **{name: linear() for name in names})), 2)
    assert found == {"up": "colwise", "down": "rowwise"}


def test_weights_with_several_users_and_uneven_sizes_stay_whole() -> None:
    def compute(own: nn.ModuleDict, x: Tensor) -> Tensor:
        x = own["shared"](F.relu(own["shared"](x)))
        made: Tensor = own["down"](F.relu(own["up"](x)))
        return made

    model = Calls(compute, shared=linear(), up=linear(WIDTH, 9), down=linear(9, WIDTH))
    assert found_plan(graph_of(model), 2) == {}
    assert found_plan(graph_of(model), 3) == {"up": "colwise", "down": "rowwise"}


def test_a_head_with_the_weight_of_the_embedding_is_divided_with_it() -> None:
    """By words, and its outputs are gathered; not if they are read in a third place, or are no
    multiple.
    """
    tokens = torch.randint(0, 6, (3, 5))

    def compute(own: nn.ModuleDict, x: Tensor) -> Tensor:
        made: Tensor = own["head"](own["words"](x))
        return made

    def found(degree: int, *, thrice: bool = False) -> dict[str, str]:
        calls = (lambda own, x: compute(own, x) + own["words"].weight.sum()) if thrice else compute
        model = Calls(calls, words=nn.Embedding(6, WIDTH), head=nn.Linear(WIDTH, 6, bias=False))
        model["head"].weight = model["words"].weight
        target = torch.zeros(3, 5, 6)
        spec = planner.in_memory(model, example_batch=((tokens,), target), loss=F.mse_loss)
        return found_plan(capture_file(spec, spec.example_batch(3)), degree)

    assert found(2) == found(3) == {"words": "colwise_gather_output"}
    assert found(4) == found(2, thrice=True) == {}
