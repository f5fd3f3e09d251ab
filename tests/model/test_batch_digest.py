"""Equal batches have one digest; a changed value, shape, type or order of samples gives another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from planner.model.batch import Batch
from planner.model.batch_digest import batch_digest, digest_of


def _images() -> Tensor:
    """Return values of 64 samples that are longer than what is hashed byte by byte."""
    return torch.randn(64, 3, 33, 17, generator=torch.Generator().manual_seed(0))


def _changed(place: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[place] = tensor[place].nextafter(torch.tensor(9.0))
        return tensor

    return change


@pytest.mark.parametrize("samples", [4, 64], ids=["short", "long"])
@pytest.mark.parametrize(
    "change",
    [
        _changed((0, 0, 0, 0)),
        _changed((-1, -1, -1, -1)),
        _changed((2, 1, 5, 3)),
        lambda tensor: tensor.roll(1, 0),
        lambda tensor: tensor.flip(0),
        lambda tensor: tensor[[1, 0, *range(2, len(tensor))]],
        lambda tensor: tensor.double(),
        lambda tensor: tensor.flatten(1),
        lambda tensor: tensor[:-1],
    ],
    ids=["first", "last", "middle", "rolled", "reversed", "swapped", "dtype", "shape", "fewer"],
)
def test_whatever_differs_shows(samples: int, change: Callable[[Tensor], Tensor]) -> None:
    one, other = _images()[:samples], change(_images()[:samples].clone())
    target = torch.arange(samples)
    assert batch_digest(Batch((one,), {}, target)) == batch_digest(
        Batch((one.clone(),), {}, target.clone())
    )
    assert batch_digest(Batch((one,), {}, target)) != batch_digest(Batch((other,), {}, target))
    assert batch_digest(Batch((target,), {}, one)) != batch_digest(Batch((target,), {}, other))


def test_how_values_lie_in_memory_does_not_matter() -> None:
    images = _images()
    transposed = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    text = torch.arange(20001, dtype=torch.uint8)
    aside = torch.cat([text[:3], text])[3:]
    assert aside.storage_offset() == 3
    assert batch_digest(Batch((images,))) == batch_digest(Batch((transposed,)))
    assert batch_digest(Batch((text,))) == batch_digest(Batch((aside,)))


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([float("nan"), -0.0]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.tensor([True, False]),
        [1, 2.5, "text", None, b"bytes"],
    ],
    ids=["scalar", "empty", "not a number", "conjugate", "sparse", "bool", "plain"],
)
def test_leaves_of_every_kind(leaf: object) -> None:
    digest = batch_digest(Batch((leaf,), {"x": leaf}))
    assert 0 <= digest < 2**63
    assert digest == batch_digest(Batch((leaf,), {"x": leaf}))
    assert digest != batch_digest(Batch((leaf,), {"x": 2}))


def test_other_objects_count_by_their_type() -> None:
    """What they print may name an address, which differs between workers."""
    assert batch_digest(Batch((object(),))) == batch_digest(Batch((object(),)))
    assert batch_digest(Batch((object(),))) != batch_digest(Batch((slice(1),)))
    assert batch_digest(Batch(("a",))) != batch_digest(Batch(("b",)))


def test_bytes_of_arrays_count() -> None:
    one, other = np.zeros(3), np.array([0.0, 0.0, 1.0])
    assert digest_of([one]) == digest_of([one.copy()])
    assert digest_of([one]) != digest_of([other])
    assert digest_of([one]) != digest_of([one.reshape(3, 1)])
    assert digest_of([np.float32(1)]) != digest_of([np.float32(2)])
    assert digest_of([np.array([object()])]) == digest_of([np.array([object()])]), (
        "addresses differ between workers"
    )
