"""Trace recurrent layers over sequences of any length: PyTorch's own way counts the steps, which
pins the length.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DispatchKey

_aten = torch.ops.aten
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def _like_output(
    sequence: Tensor, state: Tensor, weights: list[Tensor], bidirectional: bool
) -> Tensor:
    """Return a tensor as a recurrent layer makes it, (batch, steps, width) or (steps, batch,
    width).
    """
    width = state.shape[-1] * (2 if bidirectional else 1)
    return torch.cat([(sequence + weights[0].sum()).sum(-1, keepdim=True)] * width, -1)


def _lstm(
    sequence: Tensor, states: list[Tensor], weights: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    output = _like_output(sequence, states[0], weights, rest[4])
    return output, *(state + output.sum() for state in states)  # type: ignore[return-value]


def _one_state(
    sequence: Tensor, state: Tensor, weights: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    output = _like_output(sequence, state, weights, rest[4])
    return output, state + output.sum()


@contextmanager
def recurrence_untraced() -> Iterator[None]:
    """Let the tracer take recurrent layers over tensors for operations of which only the shapes
    matter.

    Their values in the graph are those of the operation, which runs as always.
    """
    one_state: tuple[Any, ...] = (_aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)
    made: dict[Any, Any] = dict.fromkeys(one_state, _one_state) | {_aten.lstm.input: _lstm}
    with ExitStack() as patched:
        for operation, stand_in in made.items():
            patched.enter_context(
                mock.patch.dict(operation.py_kernels, dict.fromkeys(_KEYS, stand_in))
            )
            # What the operation calls is remembered by key.
            patched.enter_context(mock.patch.dict(operation._dispatch_cache, clear=True))
        yield
