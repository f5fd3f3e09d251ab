"""Import packages that import torchvision or torchaudio, beside a torch for which there is none.

What they take from them here are names to compare types with. Where one imports, it is used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Members(type):
    """Classes that have a member of every name, as enumerations have."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Anything(ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Members(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finds a package of one name, and every module within it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # it is missing, or of another build than torch
        return False
    return True


for package, module in (("torchvision", "torchvision.ops"), ("torchaudio", "torchaudio")):
    if not _imports(module):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Finder(package))
