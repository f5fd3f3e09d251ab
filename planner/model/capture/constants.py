"""Values of the tensors that a forward makes from numbers alone, known while a model is traced.

The tracer's tensors have no values, so it refuses `torch.arange(2, ndim).tolist()` as it does a
look at the batch. But what no argument, weight or buffer is part of, and no random number, has the
same values in every run. So each operation on such tensors runs once more, on tensors with values,
and a look at one gives what one process would see.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from planner.model.torch_private import disable_current_modes, tree_leaves, tree_map_only
from planner.runtime import address_of

_PLAIN = (
    type(None),
    type(Ellipsis),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_READERS = frozenset(
    (
        Tensor.item,
        Tensor.tolist,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__complex__,
        Tensor.__index__,
        Tensor.equal,
        Tensor.allclose,
        Tensor.is_nonzero,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    )
)
# or with those of others
_WITHOUT_VALUES = ("empty", "new_empty", "resize", "set_", "__set__", "from_")
_UNKNOWN = object()
_LARGEST = 1 << 22  # elements; nobody decides by the values of larger ones


class KnownConstants(TorchFunctionMode):
    """Mode that gives the values of tensors that were made from numbers alone within it."""

    def __init__(self) -> None:
        super().__init__()
        # What has the values of a tensor, and how often the tensor had been changed in place when
        # it had them.
        self._known = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # branches of torch.cond are traced by another tracer, whole
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)

        leaves = tree_leaves((args, kwargs))
        computable = all(self._is_constant(leaf) for leaf in leaves)
        if func in _READERS and computable:
            return self._compute(func, args, kwargs)  # which is not random

        known = [leaf for leaf in leaves if self._is_known(leaf)]
        made = func(*args, **kwargs)

        valued = _UNKNOWN
        if computable and _has_values(func, made):
            valued = self._compute(func, args, kwargs)
        if valued is _UNKNOWN:
            self._forget_changed(known, always=_name(func) in ("__set__", "set_"))
        else:
            self._note_changes(known)
            self._note(made, valued)

        return made

    def _is_known(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf in self._known
            and self._known[leaf][1] == leaf._version
        )

    def _is_constant(self, leaf: Any) -> bool:
        if isinstance(leaf, slice):
            return all(type(part) in _PLAIN for part in (leaf.start, leaf.stop, leaf.step))
        return type(leaf) in _PLAIN or self._is_known(leaf)

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function makes of values; _UNKNOWN where that is random."""
        valued_args, valued_kwargs = tree_map_only(
            Tensor, lambda leaf: self._known[leaf][0], (args, kwargs)
        )
        # The tracer's mode for functions would note that gradients are switched off.
        with torch._C.DisableTorchFunction(), disable_current_modes(), torch.no_grad():
            before = torch.get_rng_state()
            made = func(*valued_args, **valued_kwargs)
            if torch.equal(torch.get_rng_state(), before):
                return made
            torch.set_rng_state(before)
            return _UNKNOWN

    def _note(self, made: Any, valued: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        values = [leaf for leaf in tree_leaves(valued) if isinstance(leaf, Tensor)]
        for tensor, value in zip(tensors, values, strict=True):
            if value.device.type == "cpu" and not tensor.is_inference():
                self._known[tensor] = (value, tensor._version)

    def _note_changes(self, arguments: Sequence[Tensor]) -> None:
        """Follow a change in place, which was made to the values as well, also through views."""
        for address in self._changed(arguments):
            for tensor in list(self._known):
                value, _ = self._known[tensor]
                if address_of(value) == address:
                    self._known[tensor] = (value, tensor._version)

    def _forget_changed(self, arguments: Sequence[Tensor], *, always: bool) -> None:
        if always:
            changed = {address_of(self._known[each][0]) for each in arguments}
        else:
            changed = self._changed(arguments)
        for tensor in list(self._known):
            if address_of(self._known[tensor][0]) in changed:
                del self._known[tensor]

    def _changed(self, arguments: Sequence[Tensor]) -> set[int]:
        """Return the addresses of the values of those arguments that an operation has changed."""
        entries = [(each, *self._known[each]) for each in arguments]
        return {address_of(value) for each, value, version in entries if each._version != version}


def _has_values(func: Any, made: Any) -> bool:
    """Return whether what a function made of constants has values, in shapes that are numbers."""
    if _name(func).startswith(_WITHOUT_VALUES):
        return False
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    return all(
        all(type(size) is int for size in each.shape) and each.numel() <= _LARGEST
        for each in tensors
    )


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")
