"""Regions of a forward under autocast or another gradient mode are cut, and compute in stages what
they do whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import PlannerError
from planner.model.batch import Batch
from planner.model.capture.capture import capture, capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.options import PLAIN, ModuleOptions
from planner.model.spec import in_memory
from planner.model.stage.capture_check import check_captured, further_batches
from planner.model.stage.stage import build_stage
from tests.model.splitting import assert_same, run_model, run_split

WIDTH, LAYERS = 8, 6
Context = Callable[[], AbstractContextManager[object]]


def lower() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


class Region(nn.Module):
    """Layers in a region, of which the last weight is used once more, between two layers
    without.
    """

    def __init__(self, *contexts: Context, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        ).requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, WIDTH)
        self._contexts = contexts

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = self._inside(x, self._contexts)
        result: Tensor = self.head(torch.tanh(x).float())
        return result

    def _inside(self, x: Tensor, contexts: tuple[Context, ...]) -> Tensor:
        if not contexts:
            x = self.layers(x)
            return self.layers[-1](torch.tanh(x))  # type: ignore[no-any-return]
        with contexts[0]():
            return self._inside(x, contexts[1:])


class Twice(Region):
    """Two regions of the same kind behind each other that use one weight: each casts it anew."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with self._contexts[0]():
                x = torch.tanh(layer(x) + self.head(x))
        return x.float()


class Around(Region):
    """The whole forward in one, and parts of it out again, as a rotary embedding is."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(WIDTH, device=x.device) % 2  # a constant
        with self._contexts[0]():
            x = self.stem(x)
            with torch.no_grad():
                phase = self.layers[0](x).sin()
            with off():
                x = self.layers[1](x.float() * phase.float())
            x = F.dropout(self.layers[2](x), 0.5, self.training) * mask
            return self.head(self.layers[3](x))  # type: ignore[no-any-return]


def batch_of(size: int = 4) -> Batch:
    torch.manual_seed(1)
    return Batch((torch.randn(size, WIDTH),), {}, torch.randn(size, WIDTH))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def every_layer(graph: LayerGraph) -> list[list[str]]:
    return [[layer.name] for layer in graph.layers]


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")

CONTEXTS: dict[str, tuple[Context, ...]] = {
    "autocast": (lower,),
    "autocast off": (off,),
    "no_grad": (torch.no_grad,),
    "enable_grad": (torch.enable_grad,),
    "no_grad in autocast": (lower, torch.no_grad),
    "autocast in no_grad": (torch.no_grad, lower),
    "autocast, off, on": (lower, off, lower),
    "gradients again": (torch.no_grad, torch.enable_grad, lower),
}


# as without it, or in the other order
SAME = ("enable_grad", "gradients again", "autocast in no_grad")


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_region_is_cut_at_every_layer(name: str) -> None:
    graph = capture(Region(*CONTEXTS[name]), batch_of(), loss)
    names = [layer.name for layer in graph.layers]
    assert names == [
        "stem",
        *(f"layers.{number}" for number in range(LAYERS)),
        f"layers.{LAYERS - 1}_2",
        "head",
        "loss",
    ]
    for size in (4, 3):
        batch = batch_of(size)
        whole = run_model(graph, batch, loss)
        assert_same(whole, run_split(graph, batch, [names], None))
        # The last weight of the region is used by two layers: in two stages its gradients are added
        # up in float32.
        together = [
            ["stem"],
            *([each] for each in names[1:LAYERS]),
            names[LAYERS : LAYERS + 2],
            ["head", "loss"],
        ]
        assert_same(whole, run_split(graph, batch, together, None))


@pytest.mark.parametrize("kind", [Twice, Around])
@pytest.mark.parametrize("options", [PLAIN, ModuleOptions(torch.bfloat16)])
def test_several_regions_in_one_stage_are_as_one_process(
    kind: type[Region], options: ModuleOptions
) -> None:
    graph = capture(kind(lower), batch_of(), loss, options=options)
    assert len(graph.layers) > 4
    torch.manual_seed(2)
    whole = run_model(graph, batch_of(), loss)
    torch.manual_seed(2)
    assert_same(whole, run_split(graph, batch_of(), [[layer.name for layer in graph.layers]], None))


def test_a_loss_in_a_region_and_a_decorated_forward() -> None:
    class Decorated(Region):
        forward = torch.autocast("cpu", torch.bfloat16)(Region.forward)

    def in_region(output: Tensor, target: Tensor) -> Tensor:
        with off():
            return loss(output, target)

    graph = capture(Decorated(nullcontext), batch_of(), in_region)
    assert len(graph.layers) == LAYERS + 4
    assert_same(
        run_model(graph, batch_of(), in_region),
        run_split(graph, batch_of(), [[layer.name for layer in graph.layers]], None),
    )


def test_a_frozen_part_under_no_grad_sends_nothing_back() -> None:
    graph = capture(Region(torch.no_grad, frozen=True), batch_of(), loss)
    inside = [
        value
        for value in graph.values.values()
        if value.name in ("linear_2", "linear_3", "linear_4")
    ]
    assert len(inside) == 3
    assert not any(value.requires_grad for value in inside)
    assert_same(
        run_model(graph, batch_of(), loss), run_split(graph, batch_of(), every_layer(graph), None)
    )


def test_values_have_the_dtype_of_the_region() -> None:
    graph = capture(Region(lower), batch_of(), loss)
    dtypes = [value.dtype for value in graph.values.values()]
    assert dtypes == [torch.float32, *[torch.bfloat16] * LAYERS, torch.float32, torch.float32]


def test_the_graph_of_another_region_has_another_hash() -> None:
    names = [name for name in CONTEXTS if name not in SAME]
    hashes = [capture(Region(*CONTEXTS[name]), batch_of(), loss).hash for name in names]
    assert len(set(hashes)) == len(names)
    assert capture(Region(lower), batch_of(), loss).hash == hashes[0]


def test_evaluation_and_recomputation() -> None:
    model = Region(lower)
    spec = in_memory(
        model,
        example_batch=lambda size: ((torch.randn(size, WIDTH),), torch.randn(size, WIDTH)),
        loss=loss,
    )
    graph = capture_file(spec, batch_of())
    check_captured(spec, graph, [batch_of(), *further_batches(spec, graph, batch_of())], PLAIN)
    evaluation = capture_file(spec, batch_of(), model, training=False)
    assert len(evaluation.layers) == len(graph.layers)


@pytest.mark.slow
def test_compiled_code_enters_regions() -> None:
    graph = capture(Region(lower, torch.no_grad), batch_of(), loss)
    whole = run_model(graph, batch_of(), loss)
    names = [layer.name for layer in graph.layers]
    split = run_split(graph, batch_of(), [names[:4], names[4:]], None, compile_=True)
    torch.testing.assert_close(whole.loss, split.loss, rtol=1e-2, atol=1e-3)
    assert [name for name, each in whole.gradients.items() if each is None] == [
        name for name, each in split.gradients.items() if each is None
    ]


def test_an_operation_that_fails_in_a_region_leaves_none_behind() -> None:
    graph = capture(Around(lower), batch_of(), loss)
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    state = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    with torch.no_grad():
        graph.model.get_parameter("head.weight").data = torch.zeros(WIDTH, WIDTH + 1)
    with pytest.raises(PlannerError):
        stage(batch_of(), {})
    assert (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    ) == state
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
