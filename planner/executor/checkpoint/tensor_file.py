"""Safetensors files with a checksum: written tensor by tensor from the device, read with the
safetensors package.

    8 bytes    length of the header, little-endian
    header     JSON: name -> dtype, shape, [first byte, last byte + 1]; padded with spaces
    data       the tensors, contiguous, one after the other

The package does not write them, because it would hold a second copy of a stage in memory, and would
know no checksum. Reading the format cannot execute anything. What reads raises InputError when a
file is not the `expected` one.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.errors import InputError
from planner.formats.files import Record, check_regular

# Largest elements first: tensors written in this order are all aligned, without padding between
# them.
_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
SUFFIX = ".safetensors"
# more than dots, and no control characters
_NAME = r"^[^/\x00-\x1f\x7f]*[^/.\x00-\x1f\x7f][^/\x00-\x1f\x7f]*$"
_PIECE_BYTES = 1 << 24  # 16 MiB per write and hash
_SYNC_BYTES = 1 << 28  # 256 MiB between two syncs


class TensorFile(Record):
    """What a safetensors file was when it was written, by which damage to it is found."""

    # Within its folder, and so no path.
    name: Annotated[str, Field(pattern=_NAME)]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: str
    tensors: tuple[str, ...]


class Fact(NamedTuple):
    """The name, type and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def aligned(facts: Iterable[Fact]) -> list[Fact]:
    """Sort tensors so that all are aligned in their file."""
    return sorted(facts, key=lambda fact: (-fact.dtype.itemsize, fact.name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Write `tensors`, moving one at a time to the CPU, and wait until they are on disk.

    Raise InputError for a dtype that the format lacks.
    """
    facts = aligned(
        Fact(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    )
    return write_each(path, facts, (tensors[fact.name] for fact in facts))


def write_each(path: Path, facts: Sequence[Fact], tensors: Iterable[Tensor]) -> TensorFile:
    """Write a file of the tensors that `facts` describe, in their order, as `write_tensors`
    does.
    """
    # the byte order of the format, and of every platform of PyTorch
    assert sys.byteorder == "little"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for fact in facts:
        if fact.dtype not in _NAMES:
            problem = (
                f"'{fact.name}' is a tensor of {fact.dtype}, which safetensors files cannot hold"
            )
            raise InputError(
                problem, hint="keep it out of the state, register_buffer(..., persistent=False)"
            )
        start = end
        end = end + fact.size_bytes
        header[fact.name] = {
            "dtype": _NAMES[fact.dtype],
            "shape": fact.shape,
            "data_offsets": [start, end],
        }

    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data, too, begins at a multiple of 8 bytes
    sha = hashlib.sha256()
    size = 0
    synced = 0
    contents = (bytes_of(tensor).numpy().data for tensor in tensors)
    with path.open("wb") as file:
        for content in chain([memoryview(len(text).to_bytes(8, "little") + text)], contents):
            for start in range(0, len(content), _PIECE_BYTES):
                piece = content[start : start + _PIECE_BYTES]
                file.write(piece)
                sha.update(piece)
                size += len(piece)
                # One fsync at the end would wait for the whole file: on a slow disk the worker
                # would look hung.
                if size - synced > _SYNC_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    synced = size
        file.flush()
        os.fsync(file.fileno())

    names = tuple(fact.name for fact in facts)
    return TensorFile(name=path.name, size_bytes=size, sha256=sha.hexdigest(), tensors=names)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, in one dimension."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def each_tensor(
    path: Path, names: Collection[str] | None = None, expected: TensorFile | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors `names`, or all of them, one at a time."""
    with opened(path, expected) as file:
        for name in names if names is not None else file.keys():
            yield name, copy_of(file, name)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a file, by name, without reading them."""
    with opened(path) as file:
        names = list(file.keys())  # `file` is no mapping
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def copy_of(file: Any, name: str) -> Tensor:
    """Return a tensor of an `opened` file as a copy: the package's is a view of the file, which may
    be removed.
    """
    tensor: Tensor = file.get_tensor(name)
    return tensor.clone()


@contextmanager
def opened(path: Path, expected: TensorFile | None = None) -> Iterator[Any]:
    """Open a file with the package, whose methods are not annotated; give its errors the place and
    a hint.
    """
    try:
        if expected is not None and (problem := _difference(path, expected)) is not None:
            raise InputError(
                f"'{path}' {problem}", hint="resume from another checkpoint with `resume=PATH`"
            )
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as cause:
        raise InputError(
            f"'{path}' cannot be read: {cause.strerror or cause}", hint="is it all there?"
        ) from None
    except SafetensorError as cause:
        raise InputError(
            f"'{path}' is not a complete safetensors file: {cause}", hint="is it all there?"
        ) from None


def _difference(path: Path, expected: TensorFile) -> str | None:
    check_regular(path)
    sha = hashlib.sha256()
    size = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            sha.update(piece)
            size += len(piece)

    if size != expected.size_bytes:
        return (
            f"has {size} bytes, but {expected.size_bytes} were written: it is truncated or "
            f"not the same file"
        )

    if sha.hexdigest() != expected.sha256:
        return (
            f"is corrupt: its SHA-256 is {sha.hexdigest()[:12]}…, but {expected.sha256[:12]}… "
            f"was written"
        )

    return None
