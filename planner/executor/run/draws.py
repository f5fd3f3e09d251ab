"""Notice where user code draws random numbers from a global generator, in a thread that may not
draw.

The thread that trains seeds PyTorch's generator for each layer. Another thread that reads data must
neither seed that generator nor draw from it. So what draws there raises DrawError, and is read by
the training thread instead.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from planner.model.generators import state_of_others
from planner.model.randomness import generators_kept
from planner.model.torch_private import OpOverloadPacket

_this_thread = threading.local()


class DrawError(BaseException):
    """Raised where user code draws in a thread that may not; no `except Exception` of a user holds
    it up.
    """


@contextmanager
def draws_refused() -> Iterator[None]:
    """Refuse in this thread what `reading_data` allows in others."""
    _this_thread.refuses = True
    try:
        with _RefusesDraws():
            yield
    finally:
        _this_thread.refuses = False


def refuses_draws() -> bool:
    """Return whether this thread is one where user code may not draw from global generators."""
    return bool(getattr(_this_thread, "refuses", False))


@contextmanager
def reading_data(device: torch.device) -> Iterator[None]:
    """Restore all global generators after user code; raise DrawError where it drew in a thread that
    may not.
    """
    if not refuses_draws():
        with generators_kept(device):
            yield
        return

    # PyTorch's generators are refused before anything is drawn; of the others the state tells.
    before = state_of_others()
    yield
    if state_of_others() != before:
        raise DrawError


class _RefusesDraws(TorchFunctionMode):
    """Mode, of one thread, that refuses to draw from PyTorch's global generator, before anything is
    drawn.

    It looks at calls from Python alone. A mode for all operations would multiply the time of small
    datasets by five, most of which a host that launches a GPU's kernels would wait for, because
    threads of Python take turns.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        globally = kwargs.get("generator") in (None, torch.default_generator)
        if globally and getattr(func, "__name__", None) in _drawing():
            raise DrawError
        return func(*args, **kwargs)


@cache
def _drawing() -> frozenset[str]:
    """Return the names of functions that draw: PyTorch's operations that say so, and what Python
    makes of these.
    """
    packets = {name: getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)}
    found = {
        name
        for name, packet in packets.items()
        if isinstance(packet, OpOverloadPacket)
        and any(
            torch.Tag.nondeterministic_seeded in getattr(packet, each).tags
            for each in packet.overloads()  # type: ignore[no-untyped-call]
        )
    }
    composed = {name for name in dir(F) if "dropout" in name or name in ("gumbel_softmax", "rrelu")}
    return frozenset(found | composed | {"random_", "scaled_dot_product_attention"})
