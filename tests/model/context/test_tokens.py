"""What ranks divide of a captured graph by tokens, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import PlanError
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.context.division import divided_sequences
from planner.model.context.group import SequenceGroup
from planner.model.context.tokens import token_steps
from planner.model.spec import load_model_file

# Samples of 8 tokens with 16 features each, and attention of 4 heads.
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 20)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, tokens):
        x = self.embed(tokens)
        q = self.inner(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        x = x + self.attend(q, q, q).transpose(1, 2).flatten(2)
        BODY
        return self.head(x)

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.randint(0, 20, (batch_size, 8))
    return (tokens,), tokens

def loss(output, target):
    return LOSS

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
MEAN = "F.cross_entropy(output.flatten(0, 1), target.flatten())"


def captured(
    folder: Path, body: str = "", loss: str = MEAN, heads: int = 4, more: str = ""
) -> LayerGraph:
    path = folder / "model.py"
    source = MODEL.replace("BODY", body).replace("LOSS", loss).replace("HEADS", str(heads))
    path.write_text(source + more, encoding="utf-8")
    spec = load_model_file(str(path))
    return capture_file(spec, spec.example_batch(3), spec.build_model())


def whole_operations(graph: LayerGraph, degree: int = 2) -> list[str]:
    """Return the operations on the way to the loss that every rank computes whole."""
    steps = token_steps(graph, degree)
    return [
        str(node.target).split(".")[1]
        for layer in graph.layers
        for node in layer.nodes
        if node not in steps
        and isinstance(value := node.meta.get("val"), torch.Tensor)
        and value.is_floating_point()
        and node in graph.loss_path
    ]


def test_ranks_have_their_tokens_of_all_that_has_a_gradient(tmp_path: Path) -> None:
    graph = captured(tmp_path)
    assert whole_operations(graph) == []
    shapes = {
        node.name: tuple(node.meta["val"].shape)[step.dimension]
        for node, step in token_steps(graph, 2).items()
        if step.dimension is not None
    }
    assert set(map(str, shapes.values())) <= {"8", str(graph.inputs[0].meta["val"].shape[0] * 8)}


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        ("x = x + x.cumsum(1)", ["cumsum"]),
        ("x = x + x.mean(1, keepdim=True)", ["mean"]),
        ("x = torch.cat([x[:, :1], x], 1)[:, 1:]", ["slice", "cat", "slice", "slice"]),
        ("x = x + torch.rand_like(x) * x", ["rand_like"]),
        ("x = F.layer_norm(x, (8, 16))", ["layer_norm"]),
        ("x = x.reshape(-1, 16).sin().view(-1, 8, 16)", []),
        ("x = x.transpose(0, 1).contiguous().unsqueeze(0).squeeze(0).transpose(0, 1)", []),
        # tokens of all samples one after the other
        (
            "x = x.transpose(0, 1).reshape(-1, 16).view(8, -1, 16).transpose(0, 1)",
            ["reshape", "view", "transpose"],
        ),
    ],
)
def test_what_looks_at_several_tokens_is_whole(body: str, whole: list[str], tmp_path: Path) -> None:
    assert whole_operations(captured(tmp_path, body)) == whole


@pytest.mark.parametrize(
    ("loss", "whole"),
    [
        (f"{MEAN[:-1]}, reduction='sum')", 0),
        (f"{MEAN[:-1]}, label_smoothing=0.1)", 1),
        (f"{MEAN[:-1]}, weight=torch.ones(20))", 2),
        (f"{MEAN[:-1]}, reduction='none').mean()", 2),
        ("F.cross_entropy(output.transpose(1, 2), target)", 0),
        ("output.square().mean()", 1),
    ],
)
def test_only_plain_losses_are_sums_over_the_ranks(loss: str, whole: int, tmp_path: Path) -> None:
    assert len(whole_operations(captured(tmp_path, loss=loss))) == whole


def test_a_gradient_by_frequency_needs_all_indices(tmp_path: Path) -> None:
    more = """
def build_model():
    net = Net()
    net.embed.scale_grad_by_freq = True
    return net
"""
    assert "embedding" in whole_operations(captured(tmp_path, more=more))


@pytest.mark.parametrize(
    ("degree", "heads", "body", "words"),
    [
        (3, 4, "", "3 ranks cannot shard the 8 tokens of a sequence evenly"),
        (4, 2, "", "4 ranks cannot shard the 2 heads of attention"),
        (2, 4, "y = self.attend(q[:, :, :4], q, q)", "queries of 4, 8 tokens"),
        (2, 4, "y = self.attend(q, q[:, :, :4], q[:, :, :4]).sum()", "looks at 4 others"),
        (2, 4, "x.mul_(2)", "changes one of the sharded values in place"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    degree: int, heads: int, body: str, words: str, tmp_path: Path
) -> None:
    if "y =" in body:
        body += "; x = x + y.sum()"
    graph = captured(tmp_path, body, heads=heads)
    with pytest.raises(PlanError, match=words) as refused:
        divided_sequences(graph, SequenceGroup(degree, 0))
    assert "solve for whole sequences" in str(refused.value.hint)


def test_models_without_attention_are_refused(tmp_path: Path) -> None:
    more = "\nNet.attend = lambda self, q, k, v: q + k + v\n"
    with pytest.raises(PlanError, match="no operation of the model is scaled_dot_product"):
        divided_sequences(captured(tmp_path, more=more), SequenceGroup(2, 0))


def test_hooks_on_gradients_are_refused(tmp_path: Path) -> None:
    graph = captured(tmp_path)
    head = graph.model.get_parameter("head.weight")
    head.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[no-untyped-call]
    with pytest.raises(PlanError, match=r"'head\.weight' has a hook on its gradient"):
        divided_sequences(graph, SequenceGroup(2, 0))


def test_operations_of_others_are_refused(tmp_path: Path) -> None:
    more = """
@torch.library.custom_op("planner_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, gradient: gradient.clamp(-1, 1))
"""
    graph = captured(tmp_path, "x = twice(x)", more=more)
    with pytest.raises(PlanError, match=r"planner_tests\.twice"):
        divided_sequences(graph, SequenceGroup(2, 0))
