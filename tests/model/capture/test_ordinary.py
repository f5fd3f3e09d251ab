"""Ordinary models whose forward trips a tracer: each is captured, and computes in stages what it
does whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

WIDTH = 8


def rows(size: int = 4, *shape: int) -> Batch:
    torch.manual_seed(1)
    return Batch((torch.randn(size, *shape, WIDTH),), {}, torch.randn(size, *shape, WIDTH))


def captured(model: nn.Module, batch: Batch, stages: int = 3) -> LayerGraph:
    """Capture a model; its stages compute what it does, also on a batch of another size."""
    graph = capture(model, batch, F.mse_loss)
    other = rows(3, *batch.args[0].shape[1:-1])
    for each in (batch, other):
        assert_same(
            run_model(graph, each, F.mse_loss),
            run_split(graph, each, cut_evenly(graph, stages), None),
        )
    return graph


# -- A module that several layers share, and slices of their list. --


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)) + self.shared(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(
        self, choose: Callable[[Any], Iterable[Any]], kind: type[nn.Module] = nn.ModuleList
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(WIDTH, WIDTH)
        layers = [Layer(shared) for _ in range(5)]
        self.layers = nn.ModuleList(layers) if kind is nn.ModuleList else nn.Sequential(*layers)
        self._choose = choose

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._choose(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize(
    ("choose", "chosen"),
    [
        (lambda layers: layers[:3], [0, 1, 2]),
        (lambda layers: layers[-2:], [3, 4]),
        (lambda layers: layers[1:4:2], [1, 3]),
        (lambda layers: layers[1:][1:3], [2, 3]),
        (lambda layers: layers[::-1], [4, 3, 2, 1, 0]),
    ],
)
def test_slices_of_layers_that_share_a_module(
    choose: Callable[[Any], Iterable[Any]], chosen: list[int], kind: type[nn.Module]
) -> None:
    # In one stage: stages that share a weight add up its gradients in another order.
    graph = captured(Stack(choose, kind), rows(), stages=1)
    names = [layer.name.removeprefix("layers.").split(".") for layer in graph.layers]
    assert [int(name[0]) for name in names if name[-1] == "own"] == chosen


# -- Attributes that a forward writes. --


class Features(nn.Module):
    """Keeps its features in attributes, for a later part of the same forward, as RAFT does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pyramid: Any = [torch.zeros(1)]
        self.last = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.pyramid = [self.first(x), 2 * x]
        self.last = self.pyramid[0] + self.pyramid[1]
        result: Tensor = self.second(self.last) + self.pyramid[1]
        return result


class Skip(nn.Module):
    """Writes into a list that modules share, as MONAI's DynUNet does."""

    def __init__(self, heads: list[Tensor], number: int) -> None:
        super().__init__()
        self.layer, self.heads, self.number = nn.Linear(WIDTH, WIDTH), heads, number

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        self.heads[self.number] = 2 * x
        return x


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = [torch.zeros(1)] * 3
        self.skips = nn.Sequential(*(Skip(self.heads, number) for number in range(3)))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.skips(x))
        for head in self.heads:
            x = x + head
        return x


@pytest.mark.parametrize("build", [Features, Heads])
def test_attributes_that_are_written_before_they_are_read(build: Callable[[], nn.Module]) -> None:
    model = build()
    graph = captured(model, rows())
    assert len(graph.layers) > 2
    if isinstance(model, Heads):
        assert {id(vars(skip)["heads"]) for skip in model.skips} == {id(model.heads)}, (
            "the tracer copies lists"
        )


class Kept(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor], before: Any) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(WIDTH, WIDTH), before
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, self.layer(x))


def _added(model: Any, x: Tensor) -> Tensor:
    model.kept = model.kept + x.mean()
    return x + model.kept  # type: ignore[no-any-return]


def _added_in_list(model: Any, x: Tensor) -> Tensor:
    model.kept[0] = model.kept[0] + x.mean()
    return x + model.kept[0]  # type: ignore[no-any-return]


def _made_once(model: Any, x: Tensor) -> Tensor:
    if model.kept[0] is None:
        model.kept[0] = x.detach().mean()
    return x + model.kept[0]  # type: ignore[no-any-return]


def _other_branch_later(model: Any, x: Tensor) -> Tensor:
    later = model.kept[0] is not None
    model.kept[0] = x
    return 2 * x if later else x


class Frozen(dict[str, int]):
    """A configuration that nobody may change, as those of diffusers."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("it is frozen")


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Frozen(layers=3)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x)) * self.config["layers"]


def test_a_configuration_that_refuses_changes() -> None:
    captured(Configured(), rows())


class Prepared(nn.Module):
    """Hooks its layers at the first forward, and remembers that it has, as models of transformers
    do.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self._seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "_hooked"):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self._seen.append(output))
            self._hooked = True
        self._seen.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self._seen[1]


def test_what_the_first_forward_prepares_is_prepared_again_after_a_capture() -> None:
    model = Prepared()
    captured(model, rows())
    model(*rows().args)
    assert len(model._seen) == len(model.layers)


@pytest.mark.parametrize(
    ("forward", "before"),
    [
        (_added, torch.zeros(())),
        (_added_in_list, [torch.zeros(())]),
        (_made_once, [None]),
        (_other_branch_later, [None]),
    ],
)
def test_attributes_that_the_next_forward_reads_are_refused(
    forward: Callable[[Any, Tensor], Tensor], before: Any
) -> None:
    with pytest.raises(
        CaptureError, match=r"keeps a tensor in 'self\.kept' from one forward to the next"
    ):
        capture(Kept(forward, before), rows(), F.mse_loss)


# -- What torch's own modules do. --


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(
            x, mask=nn.Transformer.generate_square_subsequent_mask(x.size(1))
        )
        return result


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        result: Tensor = self.transformer(x, x, src_mask=mask, tgt_mask=mask)
        return result


@pytest.mark.parametrize("build", [Encoder, Both])
def test_causal_masks_of_torchs_transformers(build: Callable[[], nn.Module]) -> None:
    """PyTorch looks whether the mask is causal, for a kernel that needs none: then results differ
    by rounding.
    """
    batch = rows(4, 5)
    graph = capture(build(), batch, F.mse_loss)
    whole, split = (
        run_model(graph, batch, F.mse_loss),
        run_split(graph, batch, cut_evenly(graph, 4), None),
    )
    torch.testing.assert_close(whole.loss, split.loss)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(gradient, split.gradients[name])


@pytest.mark.parametrize("name", ["parameters", "type", "train"])
def test_a_module_that_a_method_hides_is_refused_by_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0]._modules[name] = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(
        CaptureError, match=rf"'0\.{name}' of Sequential is named like a method"
    ) as refused:
        capture(model, rows(), F.mse_loss)
    assert f"'own_{name}'" in str(refused.value.hint)
