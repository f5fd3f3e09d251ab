"""Functions that generated code calls in place of captured operations: the same to the bit, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from planner.model.stage.fast_calls import FUNCTIONS, Registries

_aten = torch.ops.aten


def _x(*sizes: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(sizes).numel()).reshape(sizes).requires_grad_()


# Arguments of each, the fewest first: what is left out must have the same default.
ARGUMENTS: dict[Any, tuple[Callable[[], tuple[Any, ...]], ...]] = {
    _aten.add.Tensor: (lambda: (_x(3, 4), _x(4)), lambda: (_x(3, 4), 2), lambda: (_x(3), 1.5)),
    _aten.add_.Tensor: (lambda: (_x(3, 4) * 2, _x(4)), lambda: (torch.tensor(3), 1)),
    _aten.batch_norm.default: (lambda: (_x(4, 3), _x(3), _x(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, True),),
    _aten.cat.default: (lambda: ([_x(2, 3), _x(1, 3)],), lambda: ([_x(2, 3), _x(2, 1)], 1)),
    _aten.conv2d.default: (
        lambda: (_x(2, 3, 5, 5), _x(4, 3, 3, 3)),
        lambda: (_x(2, 4, 5, 5), _x(4, 2, 3, 3), _x(4), [2, 2], [1, 1], [1, 1], 2),
    ),
    _aten.dropout.default: (lambda: (_x(5, 5), 0.5, True), lambda: (_x(5, 5), 0.5, False)),
    _aten.embedding.default: (
        lambda: (_x(5, 2), torch.tensor([[1, 4]])),
        lambda: (_x(5, 2), torch.tensor([1, 4]), 4, True, False),
    ),
    _aten.flatten.using_ints: (lambda: (_x(2, 3, 4),), lambda: (_x(2, 3, 4), 1), lambda: (_x(2, 3, 4, 2), 1, 2)),
    _aten.gelu.default: (lambda: (_x(7),),),
    _aten.layer_norm.default: (
        lambda: (_x(3, 4), [4]),
        lambda: (_x(3, 4), [4], _x(4), _x(4), 1e-3, False),
    ),
    _aten.linear.default: (lambda: (_x(3, 4), _x(2, 4)), lambda: (_x(3, 4), _x(2, 4), _x(2))),
    _aten.matmul.default: (lambda: (_x(2, 3, 4), _x(4, 2)),),
    _aten.max_pool2d.default: (
        lambda: (_x(1, 2, 6, 6), [2, 2]),
        lambda: (_x(1, 2, 6, 6), [3, 3], [2, 2], [1, 1], [1, 1], True),
    ),
    _aten.mul.Tensor: (lambda: (_x(3, 4), _x(4)), lambda: (_x(3), 0.5), lambda: (torch.tensor([2, 3]), 2)),
    _aten.permute.default: (lambda: (_x(2, 3, 4), [2, 0, 1]),),
    _aten.relu.default: (lambda: (_x(7),),),
    _aten.relu_.default: (lambda: (_x(7) * 2,),),
    _aten.reshape.default: (lambda: (_x(2, 6), [3, -1]),),
    _aten.scaled_dot_product_attention.default: (
        lambda: (_x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4)),
        lambda: (_x(1, 2, 3, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4), None, 0.5, True),
    ),
    _aten.tanh.default: (lambda: (_x(7),),),
    _aten.transpose.int: (lambda: (_x(2, 3, 4), 0, -1),),
    _aten.unbind.int: (lambda: (_x(2, 3),), lambda: (_x(2, 3), 1)),
    _aten.unflatten.int: (lambda: (_x(2, 6), 1, [2, 3]),),
    _aten.unsqueeze.default: (lambda: (_x(2, 3), -1),),
    _aten.view.default: (lambda: (_x(2, 6), [3, 4]),),
}


def test_every_function_is_tried() -> None:
    assert set(ARGUMENTS) == set(FUNCTIONS)


@pytest.mark.parametrize("operation", ARGUMENTS, ids=str)
def test_functions_do_what_the_operations_do(operation: Any) -> None:
    for make in ARGUMENTS[operation]:
        expected, events = _run(operation, make())
        found, same = _run(FUNCTIONS[operation], make())
        assert same == events
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _run(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[list[Tensor], list[str]]:
    """Results and gradients, and the names of all operations under way, forward and backward."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own, in some versions
        with torch.autograd.profiler.profile() as profiler:
            made = call(*arguments)
            results = [made] if isinstance(made, Tensor) else list(made)
            total = sum((result * result).sum() for result in results)
            if isinstance(total, Tensor) and total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
    flat = [each for argument in arguments for each in (argument if isinstance(argument, list) else [argument])]
    gradients = [leaf.grad for leaf in flat if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None]
    return [*(result.detach() for result in results), *gradients], [event.name for event in profiler.function_events]


def test_registries_are_read_at_every_run() -> None:
    """Moving a module to a device replaces its buffers, and stages of one worker get parameters of their own."""
    weights = nn.Module()
    weights.add_module("0", nn.Linear(2, 2))
    weights.register_buffer("scale", torch.ones(1))
    code = fx.Graph()
    registries = Registries(weights, ["0.weight", "scale", "0.bias"], code)
    code.output(tuple(registries.read(name) for name in ("0.weight", "0.bias", "scale")))
    run = fx.GraphModule(nn.Module(), code)
    assert len(registries.values) == 2
    layer = weights.get_submodule("0")
    assert run(*registries.values)[0] is layer.weight
    layer._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    weights.to(torch.float64)
    assert run(*registries.values)[0] is layer.weight
    assert run(*registries.values)[2] is weights.scale
    assert weights.scale.dtype == torch.float64
