"""Deferred weights, for models larger than memory: each stage makes its own weights and no others.

The user's constructor runs as it is, but what it would compute for large tensors is put on a list
instead. They have addresses, but no pages of memory, because nothing is written there. The
operations that lead to the wanted weights are then run with the random numbers that they would have
had: the weights are those of the model built whole, to the bit.
"""

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from typing_extensions import Self

from planner.errors import ModelFileError, PlannerError
from planner.model.options import copy_hooks, gradient_hooks, parameter_like
from planner.model.torch_private import (
    TorchDispatchMode,
    disable_current_modes,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from planner.runtime import address_of

LEAST_BYTES = 1 << 16  # smaller tensors are made at once: constructors may look at their values
# in PyTorch's errors about values that are not there, and in those raised here
_NEEDED = "meta tensor"
# as many numbers whatever the values that they are given
_DRAW_BY_SHAPE = ("_like", "::bernoulli", "::normal")
_HINT = "train without `defer_weights`"


class DeferredModel:
    """A model that is built without memory for its weights, and then given those that are wanted.

    Raises a ModelFileError when the constructor reads the weights that it makes.

    Args:
        draw: whether weights may be wanted that have random values. Without, nothing is drawn.

    Attributes:
        model: its parameters are on the meta device until `materialize`.
        draws_buffers: whether the constructor makes buffers by random numbers; without `draw`,
            these have no values.
    """

    def __init__(self, build: Callable[[], nn.Module], *, draw: bool = True) -> None:
        self._tape = _Tape(LEAST_BYTES if draw else 0, draw=draw)
        try:
            with self._tape:
                self.model = build()
        except (PlannerError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            if _NEEDED not in str(error) and "Meta" not in str(error):
                raise
            reason = error.message if isinstance(error, PlannerError) else error
            raise ModelFileError(
                f"the model reads its weights while it is built, and cannot be built without "
                f"them: {reason}",
                hint=_HINT,
            ) from error

        self._values: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in self.model.parameters():
            if parameter.device.type not in ("cpu", "meta"):
                # Another device has another generator, and memory that is not the host's.
                raise ModelFileError(
                    f"build_model() makes weights on {parameter.device}, not on the CPU", hint=_HINT
                )
            if gradient_hooks(parameter):
                # Tensors that the hook reads, such as a mask, may have been put off, and nothing
                # would fill them.
                raise ModelFileError(
                    f"a parameter of shape {tuple(parameter.shape)} has a hook on its gradient, "
                    f"and what it "
                    "reads may not be there where weights are put off",
                    hint=_HINT,
                )
            if any(map(self._tape.puts_off, _tensors(vars(parameter)))):
                raise ModelFileError(
                    f"a parameter of shape {tuple(parameter.shape)} has a tensor as an attribute "
                    f"that is not there where weights are put off",
                    hint=_HINT,
                )
            self._values[parameter_like(parameter, parameter.detach().to("meta"))] = parameter

        _replace(self.model, {value: deferred for deferred, value in self._values.items()})
        # Buffers are small, and captured with the model.
        buffers = [buffer for buffer in self.model.buffers() if self._tape.puts_off(buffer)]
        self.draws_buffers = any(
            each.generator is not None for each in self._tape.leading_to(buffers)
        )
        if draw or not self.draws_buffers:
            self._tape.replay(buffers)

    def materialize(self, names: Collection[str]) -> None:
        """Give the parameters called `names` (tied ones by any name) the constructor's values; call
        it once.
        """
        values = {
            parameter: self._values[parameter] for parameter in _without_values(self.model, names)
        }
        self._tape.replay(values.values())
        self._tape.operations.clear()  # and the memory that they would write
        _replace(self.model, values)


def allocate(model: nn.Module, names: Collection[str]) -> None:
    """Give those parameters called `names` that have no memory some, without values: files give
    them.
    """
    empty = {
        parameter: parameter_like(parameter, torch.empty_like(parameter.detach(), device="cpu"))
        for parameter in _without_values(model, names)
    }
    for parameter, made in empty.items():
        copy_hooks(parameter, made)
    _replace(model, empty)


def allocate_buffers(model: nn.Module) -> None:
    """Give buffers that the constructor left on the meta device memory: they are small, and
    captured with it.
    """
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if name in module._non_persistent_buffers_set:
                place = f"{path}.{name}".removeprefix(".")
                raise ModelFileError(
                    f"buffer '{place}' is on the meta device, and no file can hold it: it is not "
                    f"persistent",
                    hint='make it with its values, outside of torch.device("meta")',
                )
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")


@contextmanager
def without_storage(model: nn.Module) -> Iterator[None]:
    """Let a deferred model be captured: within, its parameters are on the CPU, but take no
    memory.
    """
    bare = [parameter for parameter in model.parameters() if parameter.is_meta]
    hollow = {parameter: parameter_like(parameter, _unwritten(parameter)) for parameter in bare}
    _replace(model, hollow)
    try:
        yield
    finally:
        _replace(model, {new: old for old, new in hollow.items()})


def is_deferred(model: nn.Module) -> bool:
    """Return whether some of the model's parameters have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def _without_values(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return list(
        dict.fromkeys(parameter for name, parameter in named if name in names and parameter.is_meta)
    )


def _replace(model: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (new := others.get(parameter)) is not None:
                # in recurrent modules this updates a list of their weights as well
                setattr(module, name, new)


class _Operation(NamedTuple):
    """An operation that was put off; it writes into `written`, or its results are the values of
    `made`.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[Tensor]
    made: list[Tensor]
    generator: torch.Generator | None  # that it draws from
    state: Tensor | None  # of the generator before


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that puts operations on tensors of `least_bytes` and more off; what they write is put
    off, too.
    """

    def __init__(self, least_bytes: int, *, draw: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_bytes = least_bytes
        self._draw = draw
        self._put_off: set[int] = set()  # addresses of storages, which the operations keep alive
        self.operations: list[_Operation] = []
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for name in ("numpy", "tolist"):  # which no mode sees
            self._patches.enter_context(
                mock.patch.object(Tensor, name, self._checked(getattr(Tensor, name)))
            )

        # It rejects samples by their values, and draws again: as one operation that can be put off
        # like any other.
        init = nn.init._no_grad_trunc_normal_
        self._patches.enter_context(mock.patch.object(nn.init, init.__name__, self._as_one(init)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def puts_off(self, tensor: Tensor) -> bool:
        """Return whether the values of `tensor` are not there yet."""
        return _has_storage(tensor) and address_of(tensor) in self._put_off

    def replay(self, wanted: Iterable[Tensor]) -> None:
        """Run the operations that lead to the values of `wanted`, each from the making of its
        memory on.
        """
        operations = self.leading_to(wanted)
        states = {
            each.generator: each.generator.get_state()
            for each in operations
            if each.generator is not None
        }
        with torch.no_grad():
            for func, args, kwargs, _, made, generator, state in operations:
                if generator is not None:
                    assert state is not None, "built without drawing"
                    generator.set_state(state)
                result = func(*args, **kwargs)
                for tensor, value in zip(made, tree_leaves(result) if made else [], strict=True):
                    tensor.copy_(value)

        for generator, before in states.items():
            generator.set_state(before)

    def leading_to(self, wanted: Iterable[Tensor]) -> list[_Operation]:
        """Return the operations that lead to the values of `wanted`."""
        needed = {address_of(tensor) for tensor in wanted}
        found = []
        for operation in reversed(self.operations):
            if any(
                address_of(tensor) in needed for tensor in (*operation.written, *operation.made)
            ):
                needed.update(
                    map(
                        address_of, (*_tensors((operation.args, operation.kwargs)), *operation.made)
                    )
                )
                found.append(operation)

        return found[::-1]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        used = _tensors((args, kwargs))
        put_off = [tensor for tensor in used if self.puts_off(tensor)]
        device = kwargs.get("device")
        if put_off:
            aliases = [returned.alias_info for returned in func._schema.returns]
            views = bool(aliases) and all(
                alias is not None and not alias.is_write for alias in aliases
            )
            runs = views or torch.Tag.inplace_view in func.tags  # it moves no values
        elif used or not _takes_device(func) or (device is not None and device.type != "cpu"):
            runs = True
        else:  # it makes a tensor on the CPU from nothing
            made = _on_meta(func, args, kwargs)
            is_strided = isinstance(made, Tensor) and made.layout == torch.strided
            runs = not is_strided or made.nbytes < self._least_bytes

        if runs:
            return func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        given = (
            dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        )
        changed = [
            each.name
            for each in func._schema.arguments
            if each.alias_info and each.alias_info.is_write
        ]
        written = [tensor for name in changed for tensor in _tensors(given.get(name))]
        if random and not written and put_off and not func._schema.name.endswith(_DRAW_BY_SHAPE):
            self._refuse(f"{func} draws random numbers by")
        return self._later(func, args, kwargs, written, random=random)

    def _later(
        self, func: Any, args: Any, kwargs: Any, written: list[Tensor], *, random: bool
    ) -> Any:
        """Put an operation off; return what it writes, or tensors that will have the values that it
        makes.
        """
        generator = None
        if random:
            generator = kwargs.get("generator") or torch.default_generator
        state = None
        if generator is not None and self._draw:
            state = generator.get_state()
        result: Any = None
        if state is not None:
            # Into other memory: as many random numbers are drawn for it.
            scratch = partial(
                tree_map_only,
                Tensor,
                lambda leaf: _unwritten(leaf) if self.puts_off(leaf) else leaf,
            )
            result = func(*scratch(args), **scratch(kwargs))
        elif not written:
            result = _on_meta(func, args, kwargs)

        made = []
        if not written:
            if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                self._refuse("the constructor reads")
            result = tree_map(_unwritten, result)
            made = [tensor.detach() for tensor in tree_leaves(result)]

        own = {id(tensor) for tensor in written}

        def kept(tensor: Tensor) -> Tensor:
            """Return an argument such that what happens to it later does not show, but for its
            put-off values.
            """
            is_shared = self.puts_off(tensor) or id(tensor) in own
            if is_shared:
                return tensor.detach()
            return tensor.detach().clone()

        kept_args, kept_kwargs = tree_map_only(Tensor, kept, (args, kwargs))
        self._put_off.update(address_of(tensor) for tensor in (*written, *made))
        self.operations.append(
            _Operation(
                func,
                kept_args,
                kept_kwargs,
                [tensor.detach() for tensor in written],
                made,
                generator,
                state,
            )
        )
        if not written:
            return result
        if len(written) == 1:
            return written[0]
        return tuple(written)

    def _checked(self, method: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.puts_off(tensor):
                self._refuse(f"{method.__name__}() reads")
            return method(tensor, *args, **kwargs)

        return read

    def _as_one(self, init: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self.puts_off(tensor):
                return init(tensor, *args, **kwargs)
            with disable_current_modes():
                self._later(init, (tensor, *args), kwargs, [tensor], random=True)
            return tensor

        return fill

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what} the values of a {_NEEDED}")


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _unwritten(like: Tensor) -> Tensor:
    """Return zeros that take no pages of memory before they are written."""
    # Not by malloc, which gives pages that were written already, and puts small objects between
    # large ones.
    pages = mmap.mmap(-1, max(like.untyped_storage().nbytes(), 1), access=mmap.ACCESS_COPY)
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if _has_storage(leaf)]


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation makes on the meta device, which has no generator."""

    def meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, meta, (args, kwargs))
    changed = {
        name: None if isinstance(value, torch.Generator) else value
        for name, value in kwargs.items()
    }
    return func(
        *args, **(changed | {"device": torch.device("meta")} if _takes_device(func) else changed)
    )
