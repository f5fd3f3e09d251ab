"""A number for each batch, by which ranks tell whether all were given the same samples in the same order.

It covers types, shapes and all values of a batch's tensors, and its plain numbers and texts. What else a batch may
hold, such as an object of the user's, is told apart by its class alone.
"""

import hashlib
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from planner.model.batch import Batch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SUMMED_BYTES = 2**20  # larger tensors are summed up first, which reads them four times as fast as a checksum
_COLUMNS = 128
_WORD_BYTES = 8


def digest_of(batch: Batch) -> int:
    """Return 63 bits that differ where two batches do, but for one in 2^32."""
    leaves, _ = batch.flatten()
    names = sorted(batch.kwargs)
    return _mixed([repr((len(leaves), len(batch.args), names)), *map(_text, leaves)])


def digest_of_all(digests: Iterable[int]) -> int:
    """Return the digest of several batches in their order."""
    return _mixed(map(str, digests))


def _mixed(texts: Iterable[str]) -> int:
    mixed = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "big") >> 1


def _text(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {_checksum(leaf.detach())}"
    if isinstance(leaf, _PLAIN):
        return repr(leaf)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def _checksum(tensor: Tensor) -> int:
    """Return the checksum of the bytes of a tensor, or of the sums of its words by row and by column.

    Samples that change places change the sums by row, and elements that do within a sample those by column.
    """
    content = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if content.numel() <= _SUMMED_BYTES:
        return zlib.crc32(content.cpu().numpy().data)
    if content.storage_offset() % _WORD_BYTES:  # of a view whose words cannot be read where they are
        content = content.clone()
    whole = content.numel() - content.numel() % (_COLUMNS * _WORD_BYTES)
    words = content[:whole].view(torch.int64).view(-1, _COLUMNS)
    checksum = 0
    for part in (words.sum(0), words.sum(1), content[whole:]):
        checksum = zlib.crc32(part.cpu().numpy().data, checksum)
    return checksum
