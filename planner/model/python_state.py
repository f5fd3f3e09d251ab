"""What loss() and forward() read of Python: numbers, texts and containers of them, which a capture
makes constants of.

An epoch that on_update() counts, a weight that a dataset or a scheduler changes, a count of calls:
in one process the next step sees the new value, and captured layers never do. So these values are
noted when a model is captured, and looked at later. They are

- globals of the user's files, cells and defaults that the code of loss() and of the model's classes
  names, and of the functions that this calls, with what they hold: containers, objects of the
  user's classes, the user's modules;
- attributes of the model's modules, for as long as something holds them.

Code counts as called where code that is called has its name. A class may have more: a loop around
its loss(), a method that logs, a number of updates for the name of a file. Attributes that no
called code names are left out, too, unless a library's class may read them, or code reads
attributes by other names than its own.

Tensors, arrays and what libraries keep are left out: they are no constants, or nobody's to change.
"""

from __future__ import annotations

import dis
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from planner.model.capture.failure import is_users
from planner.model.spec import TrainingSpec

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MOST_ITEMS = 64  # of a container: more are data
_DEPTH = 4
_REGISTRIES = frozenset(
    ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
)
_OTHERS = object()  # stands for what is left out
_BY_OTHER_NAMES = frozenset(
    ("getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "getmembers", "eval", "exec")
)
_LIBRARIES = ("site-packages", "dist-packages")

Content = Any  # a value with `_OTHERS` in place of what is left out


@dataclass(frozen=True)
class Change:
    """A value that is another than it was."""

    name: str
    before: Content
    now: Content

    @property
    def words(self) -> str:
        """What changed, as "'E' (from [0] to [1])"."""
        texts = [_shown(self.before), _shown(self.now)]
        return f"'{self.name}'" + (f" (from {texts[0]} to {texts[1]})" if all(texts) else "")


class PythonState:
    """The values that the user's loss() and model read, as they were when this was made.

    Args:
        spec: whose loss() is read.
        model: whose classes are.
        attributes: whether attributes of modules count: those of blocks may be scratch space of one
            call.
    """

    def __init__(self, spec: TrainingSpec, model: nn.Module, *, attributes: bool = True) -> None:
        self._readers: dict[tuple[str, int], Callable[[], Any]] = {}  # by name, and what has it
        self._seen: set[int] = set()
        self._names = {"forward"}  # that called code has
        self._methods: list[tuple[str, FunctionType]] = []  # of followed classes, not called so far

        if spec.loss is not None:
            self._follow(spec.loss)
        for module_class in dict.fromkeys(type(module) for module in model.modules()):
            self._follow_class(module_class)
        if attributes:
            for path, module in model.named_modules():
                read = partial(self._module_attributes, weakref.ref(module))
                self._readers[f"{path}.".lstrip("."), id(module)] = read

        self._follow_called()
        self.note()

    def note(self) -> None:
        """Note the values as they are now."""
        self._noted = self._now()

    def change(self) -> Change | None:
        """Return the first value that is another than it was; None where all are the same."""
        now = self._now()
        for key, before in self._noted.items():
            change = _changed(key[0], before, now[key])
            if change is not None:
                return change
        return None

    def _now(self) -> dict[tuple[str, int], Content]:
        return {
            key: _content(read(), _DEPTH, self._read_names) for key, read in self._readers.items()
        }

    @property
    def _read_names(self) -> frozenset[str] | None:
        """The names that attributes may be read by; None for all."""
        if self._names & _BY_OTHER_NAMES:
            return None
        return frozenset(self._names)

    def _module_attributes(self, reference: weakref.ref[nn.Module]) -> Any:
        module = reference()
        if module is None:
            return {}
        return _attributes(module, self._read_names)

    def _class_attributes(self, cls: type) -> dict[str, Any]:
        """Return the attributes of a class, those that it has from others of the user's
        included.
        """
        found: dict[str, Any] = {}
        for each in reversed(cls.__mro__):
            if _is_own_class(each):
                found |= {
                    name: value for name, value in vars(each).items() if not name.startswith("__")
                }
        return _read_of(found, cls, self._read_names)

    def _follow(self, function: Any) -> None:
        """Note what the code of a function, or of what may be called like one, reads."""
        if isinstance(function, partial):
            self._follow(function.func)
            return
        if isinstance(function, MethodType):
            self._follow_object(function.__self__)
            function = function.__func__
        if callable(function):
            function = inspect.unwrap(function)
        if not isinstance(function, FunctionType):
            self._follow_object(function)
            return
        if id(function.__code__) in self._seen or not _is_own(function.__code__.co_filename):
            return

        self._seen.add(id(function.__code__))
        self._names.update(_names_in(function.__code__))
        name = function.__name__
        if function.__defaults__:
            self._readers[f"defaults of {name}()", id(function)] = partial(
                getattr, function, "__defaults__"
            )

        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        for variable, cell in cells:
            self._note(variable, cell, partial(_cell_content, cell))
        for variable in _globals_in(function.__code__):
            if variable in function.__globals__:
                read = partial(_global, function.__globals__, variable)
                self._note(variable, function.__globals__, read, function.__code__)

    def _note(
        self, name: str, owner: object, read: Callable[[], Any], code: CodeType | None = None
    ) -> None:
        value = read()
        if isinstance(value, type):
            self._follow_class(value)
        elif isinstance(value, ModuleType):
            self._follow_module(name, value, () if code is None else code.co_names)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self._follow(value)
        else:
            self._readers[name, id(owner)] = read

    def _follow_class(self, cls: type) -> None:
        for each in cls.__mro__:
            if id(each) in self._seen or not _is_own_class(each):
                continue
            self._seen.add(id(each))
            self._readers[each.__name__, id(each)] = partial(self._class_attributes, each)
            for name, member in vars(each).items():
                function = member
                if isinstance(member, (staticmethod, classmethod)):
                    function = member.__func__
                if isinstance(function, property):
                    function = function.fget
                if isinstance(function, FunctionType) and name != "__init__":
                    self._methods.append((name, function))
                    if _may_be_called_unnamed(cls, name):
                        self._names.add(name)

    def _follow_called(self) -> None:
        """Follow the methods that called code names, of all objects that are held, and those that
        these name.
        """
        followed = -1
        while followed < len(self._seen):
            followed = len(self._seen)
            for read in list(self._readers.values()):
                for each in _own_classes(read(), _DEPTH):
                    self._follow_class(each)

            called = [function for name, function in self._methods if name in self._names]
            self._methods = [each for each in self._methods if each[0] not in self._names]
            for function in called:
                self._follow(function)

    def _follow_module(self, name: str, module: ModuleType, names: tuple[str, ...]) -> None:
        if not _is_own(getattr(module, "__file__", None) or ""):
            return
        for each in names:
            if each in vars(module):
                self._note(f"{name}.{each}", vars(module), partial(_global, vars(module), each))

    def _follow_object(self, value: Any) -> None:
        if _is_own_class(type(value)):
            self._readers[type(value).__name__ + "()", id(value)] = lambda: value
            self._follow_class(type(value))


@lru_cache(maxsize=1 << 12)
def _is_own(file: str) -> bool:
    """Return whether code is the user's, and no library's."""
    path = Path(file)
    is_standard = path.is_relative_to(Path(inspect.__file__).parent) or path.is_relative_to(
        sys.prefix
    )
    return (
        bool(file)
        and is_users(file)
        and not is_standard
        and not any(part in _LIBRARIES for part in path.parts)
    )


def _is_own_class(cls: type) -> bool:
    if cls.__module__ == "builtins":
        return False
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file is not None:
        return _is_own(file)
    # A model file is imported under a name of its own.
    functions = [member for member in vars(cls).values() if isinstance(member, FunctionType)]
    return any(_is_own(function.__code__.co_filename) for function in functions)


def _may_be_called_unnamed(cls: type, name: str) -> bool:
    """Return whether a method is called by an operator, or by a class of a library that has one of
    this name.
    """
    is_special = name.startswith("__") and name.endswith("__")
    return is_special or any(name in vars(each) for each in cls.__mro__ if not _is_own_class(each))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, that within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _globals_in(code: CodeType) -> Iterator[str]:
    """Yield the globals that code names, that within it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and isinstance(
            instruction.argval, str
        ):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def _global(variables: Mapping[str, Any], name: str) -> Any:
    return variables.get(name, _OTHERS)


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _OTHERS


def _attributes(value: Any, names: frozenset[str] | None) -> dict[str, Any]:
    """Return the attributes of an object that called code names, or a library may read; all where
    `names` is None.
    """
    found = {name: each for name, each in vars(value).items() if name not in _REGISTRIES}
    return _read_of(found, type(value), names)


def _read_of(attributes: dict[str, Any], cls: type, names: frozenset[str] | None) -> dict[str, Any]:
    if names is None or not _is_read_by_name(cls):
        return attributes
    return {name: each for name, each in attributes.items() if name in names}


def _is_read_by_name(cls: type) -> bool:
    """Return whether all code that reads an object's attributes is the user's: no library has a
    class for it.
    """
    is_own = all(each in (nn.Module, object) or _is_own_class(each) for each in cls.__mro__)
    return is_own and not is_dataclass(cls)


def _content(value: Any, depth: int, names: frozenset[str] | None) -> Content:
    if isinstance(value, _PLAIN):
        return value
    if depth == 0:
        return _OTHERS
    if isinstance(value, _CONTAINERS):
        return _content_of_container(value, depth, names)
    if isinstance(value, nn.Module) or (hasattr(value, "__dict__") and _is_own_class(type(value))):
        # What a library's object holds, the library reads.
        inner = names if _is_read_by_name(type(value)) else None
        return _content(_attributes(value, names), depth - 1, inner)

    return _OTHERS


def _content_of_container(value: Any, depth: int, names: frozenset[str] | None) -> Content:
    if len(value) > _MOST_ITEMS:
        return _OTHERS
    if isinstance(value, dict):
        items = [(key, each) for key, each in value.items() if isinstance(key, _PLAIN)]
        return {key: _content(each, depth - 1, names) for key, each in items}
    if isinstance(value, (set, frozenset)):
        return {repr(each) for each in value if isinstance(each, _PLAIN)}
    return [_content(each, depth - 1, names) for each in value]


def _own_classes(value: Any, depth: int) -> Iterator[type]:
    """Yield the user's classes of what a value holds."""
    if depth == 0 or isinstance(value, _PLAIN):
        return
    parts: Iterable[Any] = ()
    if isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        parts = parts if len(value) <= _MOST_ITEMS else ()
    elif isinstance(value, nn.Module) or (
        hasattr(value, "__dict__") and _is_own_class(type(value))
    ):
        yield from [type(value)] if _is_own_class(type(value)) else []
        parts = _attributes(value, None).values()

    for each in parts:
        yield from _own_classes(each, depth - 1)


def _changed(name: str, before: Content, now: Content) -> Change | None:
    """Return the innermost change; a dictionary may grow, as one that remembers results does."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            inner = None
            if key in now:
                inner = _changed(_inner_name(name, key), value, now[key])
            if inner is not None:
                return inner
        return None

    if before is now or before == now or repr(before) == repr(now):  # which NaN has, too
        return None
    return Change(name, before, now)


def _inner_name(name: str, key: Any) -> str:
    if name == "" or name.endswith("."):
        return f"{name}{key}"
    if isinstance(key, str) and key.isidentifier():
        return f"{name}.{key}"
    return f"{name}[{key!r}]"


def _shown(content: Content) -> str:
    text = "" if content is _OTHERS else repr(content)
    if "object at" not in text and len(text) <= 40:
        return text
    return ""
