"""A digest of a batch, by which workers that read data for themselves tell whether they read the
same.

It covers shapes, dtypes and values, and the order of samples. It is meant for data that differs by
mistake: nobody tries to build two batches of one digest. So long tensors are summed, which takes a
tenth of the time of a hash, and on a GPU moves a few numbers to the host.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from planner.model.batch import Batch

_HASHED_BYTES = 2**14  # of a tensor, at most; of longer ones the sums are hashed
_COLUMNS = 512  # of eight bytes: as many column sums, and a row sum for each 4 KiB
# values that have the same text in every process
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def batch_digest(batch: Batch) -> int:
    """Return a number below 2^63 that two batches share if shapes, dtypes and values of their
    tensors are equal.

    Numbers and texts among the batch's leaves count, too, and the bytes of arrays and images. Of
    other objects only the type does, because what they print may name an address.
    """
    leaves, _ = batch.flatten()
    return digest_of([len(batch.args), *sorted(batch.kwargs), *leaves])


def digest_of_all(digests: Iterable[int]) -> int:
    """Return the digest of several batches in their order."""
    return digest_of(list(digests))


def digest_of(leaves: Iterable[Any]) -> int:
    """Return the digest of some leaves of a batch: see `batch_digest`."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
            digest.update(_content(leaf.detach()))
        elif isinstance(leaf, _PLAIN):
            digest.update(f"{type(leaf).__name__} {leaf!r};".encode())
        else:
            digest.update(f"{type(leaf).__name__};".encode())
            digest.update(_bytes_in(leaf))

    return int.from_bytes(digest.digest(), "big") >> 1


def _bytes_in(leaf: Any) -> bytes:
    """Return the bytes of an array of NumPy's, an image of Pillow's, and their like; none of other
    objects.
    """
    dtype = getattr(leaf, "dtype", None)
    if not hasattr(leaf, "tobytes") or getattr(dtype, "hasobject", False):  # those are addresses
        return b""
    shape = getattr(leaf, "shape", getattr(leaf, "size", None))
    return f"{dtype} {shape};".encode() + bytes(leaf.tobytes())


def _content(tensor: Tensor) -> bytes:
    """Return the bytes of a short tensor, and sums of a long one by which moved or changed values
    show.
    """
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.nbytes == 0 or tensor.is_meta:
        return b""

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() <= _HASHED_BYTES:
        return flat.cpu().numpy().tobytes()

    row_bytes = 8 * _COLUMNS
    whole = flat.numel() // row_bytes * row_bytes
    rest = flat[whole:].cpu().numpy().tobytes()
    if flat.storage_offset() % 8:  # which no view of eight bytes may begin at
        flat = flat.clone()
    table = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
    # Sums of integers wrap around, and so do not depend on the order of summation, nor on the
    # device.
    sums = torch.cat([table.sum(0), table.sum(1)])
    return sums.cpu().numpy().tobytes() + rest
