"""A backward in two parts equals autograd's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from planner.executor.stage.split_backward import input_gradients


class Sequence(nn.Sequential):
    """Like most stages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh())


class Convolutions(nn.Module):
    """Operations read the weights directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x[:, None])))[:, 0]
        return result


class Shared(nn.Module):
    """One weight is used twice, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.once(torch.tanh(linear(x, self.twice))), self.twice)


class Beside(nn.Module):
    """One weight is off the path from the input, one has no effect, one makes another."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.unused = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.scale, self.matrix = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix * self.scale.exp()) + self.bias + self.bias.sin()


class Recurrent(nn.Module):
    """One operation has many weights and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, _) = self.lstm(x[None])
        result: Tensor = outputs[0] + hidden.sum(0)
        return result


MODULES: list[Callable[[], nn.Module]] = [Sequence, Convolutions, Shared, Beside, Recurrent]


@pytest.mark.parametrize("make", MODULES)
def test_both_parts_together_are_the_whole(make: Callable[[], nn.Module]) -> None:
    """Run the first parts of two units before their second parts, as zb-h1 does."""
    torch.manual_seed(0)
    module = make()
    units = [torch.randn(4, 6) for _ in range(2)]
    gradients = [torch.randn(4, 6) for _ in range(2)]
    whole, rests = [unit.clone().requires_grad_() for unit in units], []
    for x, gradient in zip(whole, gradients, strict=True):
        torch.autograd.backward(module(x), gradient)
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    split = [unit.clone().requires_grad_() for unit in units]
    for x, gradient in zip(split, gradients, strict=True):
        rests.append(
            input_gradients([get_gradient_edge(module(x))], [gradient], [x], module.parameters())
        )
        assert x.grad is not None
    for rest in rests:
        rest.run()
    for x, y in zip(split, whole, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    for name, parameter in module.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)
    tensors = [p.grad for p in module.parameters() if p.grad is not None]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), (
        "no two weights share a gradient"
    )


@pytest.mark.parametrize("make", MODULES)
def test_hooks_of_weights_are_called_once_per_unit(make: Callable[[], nn.Module]) -> None:
    """A hook that changes the gradient changes it once: of weights on the path, beside it, and used
    twice.
    """

    def gradients_of(*, split: bool) -> tuple[dict[str, Tensor | None], dict[str, list[str]]]:
        torch.manual_seed(0)
        module = make()
        calls: dict[str, list[str]] = {}
        for name, parameter in module.named_parameters():
            heard = calls.setdefault(name, [])

            def change(gradient: Tensor, heard: list[str] = heard) -> Tensor:
                heard.append("gradient")
                return gradient * 0.5

            def accumulated(_: Tensor, heard: list[str] = heard) -> None:
                heard.append("accumulated")

            parameter.register_hook(change)  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                accumulated
            )

        x = torch.randn(4, 6, requires_grad=True)
        output = module(x)
        gradient = torch.randn(4, 6)
        if split:
            input_gradients([get_gradient_edge(output)], [gradient], [x], module.parameters()).run()
        else:
            torch.autograd.backward(output, gradient)
        return {name: parameter.grad for name, parameter in module.named_parameters()}, calls

    whole, whole_calls = gradients_of(split=False)
    parts, parts_calls = gradients_of(split=True)

    assert parts_calls == whole_calls
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, msg=name)


def test_the_first_part_makes_no_gradient_of_a_weight_and_the_second_none_of_an_input() -> None:
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    x = torch.randn(4, 6, requires_grad=True)
    output = module(x)
    products = []

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(  # type: ignore[no-untyped-def]
            self, func, types, args=(), kwargs=None
        ):
            products.append(func is torch.ops.aten.mm.default)
            return func(*args, **(kwargs or {}))

    with Count():  # type: ignore[no-untyped-call]
        rest = input_gradients(
            [get_gradient_edge(output)], [torch.ones_like(output)], [x], module.parameters()
        )
        assert sum(products) == 2
        assert all(parameter.grad is None for parameter in module.parameters())
        rest.run()
    assert sum(products) == 4


def test_hooks_that_wait_for_gradients_are_called_in_the_second_part() -> None:
    layer, seen = nn.Linear(3, 3), []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, name=name: seen.append(name)
        )
    x = torch.randn(2, 3, requires_grad=True)
    rest = input_gradients([get_gradient_edge(layer(x).sum())], [None], [x], layer.parameters())
    assert seen == []
    rest.run()
    assert sorted(seen) == ["bias", "weight"]
