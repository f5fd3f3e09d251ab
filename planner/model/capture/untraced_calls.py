"""Calls that the tracer takes and fails at later, with words that do not name them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from planner.errors import CaptureError
from planner.model.capture.failure import calling_place


class RefuseGenerators(TorchFunctionMode):
    """Context that raises CaptureError where random numbers are drawn from a generator of the
    model's own.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # The tracer fails at any, of a size that depends on the batch.
        generator = kwargs.pop("generator", None)
        if generator is not None:
            raise CaptureError(
                f"random numbers are drawn from a torch.Generator{_place()}, which is no part of "
                f"a captured graph",
                hint="leave out generator=...: PyTorch's own generator is seeded alike under "
                "every plan; make what is "
                "the same in every call once, in the model's __init__, and keep it in a buffer",
            )

        return func(*args, **kwargs)


@contextmanager
def noting_gradients() -> Iterator[list[str]]:
    """Yield a list that gets the places where the user's code asks for gradients, " at
    model.py:12".
    """
    places: list[str] = []
    grad = torch.autograd.grad

    def noted(*args: Any, **kwargs: Any) -> Any:
        places.append(_place())
        return grad(*args, **kwargs)

    with mock.patch.object(torch.autograd, "grad", noted):
        yield places


def refuse_gradients(places: Sequence[str], cause: Exception) -> None:
    """Raise CaptureError for a trace that failed, where gradients were asked for in it."""
    if places:
        raise CaptureError(
            f"the model or loss() takes gradients{places[0]}, by torch.autograd.grad, and that "
            f"cannot be captured",
            hint="compute them in forward of one of blocks(model), which run as they are, and "
            "return them with the "
            "output for loss(output, target): see docs/guides/own-model.md",
        ) from cause


def _place() -> str:
    place = calling_place()
    return "" if place is None else f" at {place}"
