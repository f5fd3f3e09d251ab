"""Let parts of a batch see what the whole batch saw: the same noise, no dropout, no statistics of
the batch.

A batch and its parts otherwise differ by these, whatever their loss is a mean over. The model stays
in training mode, because a loss may have parts that are for training alone, such as the load
balancing of experts.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from planner.model.torch_private import TorchDispatchMode, tree_leaves

# Functions of Python, by the argument that says that they are to be as in training.
_IN_TRAINING = (
    F.batch_norm,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)
# Builtins, by the position of that argument.
_BUILTINS = {torch.batch_norm: 5, torch.dropout: 2, torch.dropout_: 2, torch.feature_dropout: 2}
# whose only float is the dropout between layers
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_ATTENTION_DROPOUT = 4  # position of scaled_dot_product_attention's


class UnequalNoiseError(RuntimeError):
    """Parts of a batch draw random numbers that are no parts of the whole batch's."""


class NoiseOfWhole(TorchDispatchMode):
    """Mode under which parts of a batch draw the random numbers that the whole batch drew for the
    same samples.

    What a batch draws is recorded in order. Then a part gets, for each of its draws, the rows of
    its samples, along the dimension in which its draw is smaller than the whole batch's.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[list[Tensor]] = []
        self._samples: range | None = None  # of the batch that runs; None for the whole
        self._size = 0  # of the whole batch
        self._next = 0

    def of_whole(self, size: int) -> "NoiseOfWhole":
        """Record what a batch of `size` samples draws."""
        self.draws.clear()
        self._samples = None
        self._size = size
        return self

    def of_part(self, samples: range) -> "NoiseOfWhole":
        """Repeat what was recorded for these samples."""
        self._samples = samples
        self._next = 0
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result

        drawn = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if self._samples is None:
            self.draws.append([each.detach().clone() for each in drawn])
        else:
            self._repeat(drawn, self._samples)

        return result

    def _repeat(self, drawn: Sequence[Tensor], samples: range) -> None:
        if self._next >= len(self.draws):
            raise UnequalNoiseError(
                "a part of a batch draws more random numbers than the whole batch"
            )

        recorded = self.draws[self._next]
        self._next += 1

        for tensor, whole in zip(drawn, recorded, strict=True):
            with torch.no_grad():
                tensor.copy_(self._rows(whole, tensor.shape, samples))

    def _rows(self, whole: Tensor, shape: torch.Size, samples: range) -> Tensor:
        if whole.shape == shape:
            return whole
        if whole.dim() == len(shape):
            dimension, *others = [
                number for number, size in enumerate(shape) if size != whole.shape[number]
            ]
            each, rest = divmod(whole.shape[dimension], self._size)
            if not others and not rest and shape[dimension] == each * len(samples):
                return whole.narrow(dimension, each * samples.start, each * len(samples))

        raise UnequalNoiseError(
            f"a part of a batch draws {tuple(shape)}, and the whole batch {tuple(whole.shape)}"
        )


class Quiet(TorchFunctionMode):
    """Mode without dropout, in which BatchNorm takes the statistics that it has, as in
    evaluation.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = _quiet(func, args, dict(kwargs or {}))
        return func(*args, **kwargs)


def _quiet(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    if func in _IN_TRAINING:
        bound = inspect.signature(func).bind(*args, **kwargs)
        if func is not F.batch_norm or bound.arguments.get("running_mean") is not None:
            bound.arguments["training"] = False
        return bound.args, bound.kwargs

    if func in _BUILTINS:
        at = _BUILTINS[func]
        if len(args) > at and (func is not torch.batch_norm or args[3] is not None):
            return (*args[:at], False, *args[at + 1 :]), kwargs

    if func in _RECURRENT:
        return tuple(0.0 if isinstance(each, float) else each for each in args), kwargs

    if func is F.scaled_dot_product_attention:
        return args[:_ATTENTION_DROPOUT], _without_dropout(args, kwargs)

    return args, kwargs


def _without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("dropout_p", "is_causal")
    positional = dict(zip(names, args[_ATTENTION_DROPOUT:], strict=False))
    return {**kwargs, **positional, "dropout_p": 0.0}
