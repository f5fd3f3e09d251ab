"""Import a user's model file, and name the line of it that an error comes from."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from planner.errors import ModelFileError, reason_of

DEFAULT_BUILDER = "build_model"


def split_location(location: str) -> tuple[Path, str]:
    """Split "model.py:builder" into the path and the name of the builder, which may be left out."""
    path, colon, builder = location.rpartition(":")
    # The colon of a Windows drive is followed by a path, not by a function's name.
    return (Path(path), builder) if colon and builder.isidentifier() else (Path(location), DEFAULT_BUILDER)


def import_file(path: Path) -> ModuleType:
    """Import the Python file at `path`; raise ModelFileError when it is no Python file, or fails."""
    path = path.resolve()
    # Named by its path, because two model files may both be called model.py.
    name = "planner_model_file_" + "".join(c if c.isalnum() else "_" for c in str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"'{path}' is not a Python file", hint="a model file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        with on_path(path.parent):
            spec.loader.exec_module(module)
    except SyntaxError as cause:
        del sys.modules[name]
        place = f"{cause.filename}:{cause.lineno}"
        raise ModelFileError(f"{place} is not Python: {cause.msg}", hint="correct the file") from cause
    except (Exception, SystemExit) as cause:  # whatever the user's code raises, sys.exit() included
        del sys.modules[name]
        raise ModelFileError(
            f"'{path}' cannot be imported, it fails at {failing_line(cause, path.parent) or path}: {reason_of(cause)}",
            hint="python " + str(path) + " shows the whole traceback",
        ) from cause
    return module


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put `folder` on the import path, so that a model file in it can import its siblings."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def failing_line(cause: BaseException, folder: Path) -> str | None:
    """Return the innermost line of code in `folder` on the way to the error, "model.py:12"."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().parent == folder.resolve()]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
