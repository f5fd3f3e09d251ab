"""Attributes that a model's forward assigns: those that it writes before it reads them are of no
concern.

Tracing drops what a forward leaves in attributes. That is right for scratch space, such as a list
of features that later modules of the same call read, and wrong for what the next call reads. To
tell them apart the model is traced once more, with tensors in those attributes that may not be
read: the two graphs must be equal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, fx, nn

from planner.errors import CaptureError
from planner.model.torch_private import tree_leaves, tree_map, tree_map_only

# LSTM and GRU rebuild the last in forward.
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_flat_weights")
_CONTAINERS = (list, dict)
_TENSOR = object()


@dataclass(frozen=True)
class Assignment:
    """An attribute that holds other tensors after a forward than before."""

    owner: str  # class of the module
    attributes: dict[str, Any]  # of the module, which the tracer's wrappers of it share
    name: str
    value: Any  # after the forward, with `_TENSOR` in place of tensors
    is_buffer: bool

    def refused(self) -> CaptureError:
        return CaptureError(
            f"{self.owner} keeps a tensor in 'self.{self.name}' from one forward to the next",
            hint=f"make it a buffer and change it in place, with self.{self.name}.copy_(...)",
        )


class _Unreadable(Tensor):
    """A tensor of an earlier forward."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("a tensor of an earlier forward is read")


@contextmanager
def noting_assignments(model: nn.Module, noted: list[Assignment]) -> Iterator[None]:
    """Note the attributes of `model` that a traced forward gives other tensors.

    What has a new name is removed again: it is the tracer's, without data, and of no use to later
    code.
    """
    before = _held_tensors(model)
    yield
    for key, (holder, name, tensors) in _held_tensors(model).items():
        if key not in before:
            if tensors:
                delattr(holder, name)
        elif [*map(id, before[key][2])] != [*map(id, tensors)]:
            is_buffer = name in holder._buffers
            if is_buffer:
                value = holder._buffers[name]
            else:
                value = vars(holder)[name]
            held = tree_map_only(Tensor, lambda _: _TENSOR, value)
            noted.append(Assignment(type(holder).__name__, vars(holder), name, held, is_buffer))


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore attributes afterwards, also a list that several modules share: the tracer gives each
    a copy.

    Those that are new are removed. A forward that prepares its modules at its first call, and then
    remembers that it has, does so again at the next.
    """
    attributes = [(vars(module), _without_registries(module)) for module in model.modules()]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, values in attributes:
        for value in values.values():
            _note_contents(value, contents)

    try:
        yield
    finally:
        for current, values in attributes:
            for name in current.keys() - values.keys() - set(_REGISTRIES):
                del current[name]
            current.update(values)
        for container, content in contents.values():
            # one that refuses changes, such as a configuration, has none
            if not _holds(container, content):
                _fill(container, content)


def trace_scratch(
    model: nn.Module,
    trace: Callable[[list[Assignment]], fx.GraphModule],
    noted: Sequence[Assignment],
    first: fx.GraphModule,
) -> None:
    """Trace once more, as every forward after the first runs; raise CaptureError where that gives
    another graph.

    `trace` notes assignments, and `noted` are those of the `first` trace.
    """
    kept = next((each for each in noted if each.is_buffer), None)
    if kept is not None:
        raise kept.refused()

    with attributes_kept(model):
        for each in noted:
            unreadable = tree_map(
                lambda leaf: _Unreadable() if leaf is _TENSOR else leaf, each.value
            )
            current = each.attributes[each.name]
            if isinstance(current, _CONTAINERS) and type(current) is type(unreadable):
                _fill(current, unreadable)  # for all modules that share it
            else:
                each.attributes[each.name] = unreadable

        try:
            again = trace([])
        except Exception as cause:  # whatever the user's forward makes of what it may not read
            raise noted[0].refused() from cause

    if _text(again) != _text(first):
        raise noted[0].refused()


def _text(module: fx.GraphModule) -> str:
    constants = [
        repr(value.tolist())
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(value := _attribute(module, str(node.target)), Tensor)
        and not isinstance(value, nn.Parameter)
    ]
    return f"{module.graph} {constants}"


def _attribute(module: nn.Module, path: str) -> Any:
    holder, _, name = path.rpartition(".")
    return getattr(module.get_submodule(holder), name)


def _without_registries(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


def _note_contents(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Note what a container holds, and the containers within it."""
    if not isinstance(value, _CONTAINERS) or id(value) in contents:
        return
    contents[id(value)] = value, dict(value) if isinstance(value, dict) else list(value)
    for part in value.values() if isinstance(value, dict) else value:
        _note_contents(part, contents)


def _holds(container: Any, content: Any) -> bool:
    """Return whether a container holds the very objects of `content`, in the same order."""
    if isinstance(container, dict):
        return [*container] == [*content] and _holds(
            list(container.values()), list(content.values())
        )
    return [*map(id, container)] == [*map(id, content)]


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        container.clear()
        container.update(content)
    else:
        container[:] = content


def _held_tensors(model: nn.Module) -> dict[tuple[int, str], tuple[nn.Module, str, list[Tensor]]]:
    return {
        # The tracer wraps a module that has several names, each time anew. Its wrappers share the
        # module's attributes.
        (id(vars(module)), name): (
            module,
            name,
            [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)],
        )
        for module in model.modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if isinstance(value, (Tensor, list, tuple, dict)) and name not in _REGISTRIES
    }
