"""Digests of batches: whatever differs between two batches changes them, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from planner.model.batch import Batch
from planner.model.batch_digest import batch_digest, digest_of_all

SMALL = torch.arange(24.0).reshape(4, 6)
# Beyond a mebibyte, where words are summed up; an odd number of rows leaves a rest.
LARGE = torch.randn(513, 3, 16, 17, generator=torch.Generator().manual_seed(0))
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def swapped(tensor: Tensor) -> Tensor:
    """Return a tensor whose second and third sample have changed places."""
    return tensor[torch.tensor([0, 2, 1, *range(3, len(tensor))])]


def changed_last(tensor: Tensor) -> Tensor:
    """Return a tensor of which the very last element differs."""
    other = tensor.clone()
    other.view(-1)[-1] += 1
    return other


@pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "change",
    [
        swapped,
        changed_last,
        lambda tensor: tensor.flip(-1),
        lambda tensor: tensor.flip(1),
        lambda tensor: tensor.roll(1, -1),
        lambda tensor: tensor[:-1],
        lambda tensor: tensor.unsqueeze(1),
        lambda tensor: tensor.double(),
    ],
    ids=["samples", "last", "columns", "rows", "shift", "fewer", "shape", "type"],
)
def test_tensors_that_differ_have_other_digests(
    tensor: Tensor, change: Callable[[Tensor], Tensor]
) -> None:
    assert batch_digest(Batch((change(tensor),))) != batch_digest(Batch((tensor,)))


@pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_told_apart_by_themselves_however_they_lie_in_memory(
    tensor: Tensor, dtype: torch.dtype
) -> None:
    tensor = tensor.to(dtype)
    digest = batch_digest(Batch((tensor,)))
    behind = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)
    strided = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    assert [batch_digest(Batch((each,))) for each in (tensor.clone(), behind, strided)] == [
        digest
    ] * 3
    if tensor.is_complex():
        assert batch_digest(Batch((tensor.conj(),))) == batch_digest(
            Batch((tensor.conj().resolve_conj(),))
        )


@pytest.mark.parametrize(
    "other",
    [
        Batch((SMALL, SMALL), {}, 1),
        Batch((SMALL,), {"x": SMALL}, 2),
        Batch((SMALL,), {"y": SMALL}, 1),
        Batch((SMALL,), {"x": SMALL}, "1"),
        Batch((SMALL,), {"x": [SMALL, None]}, 1),
    ],
    ids=["place", "number", "name", "text", "nested"],
)
def test_all_that_is_plain_in_a_batch_counts(other: Batch) -> None:
    assert batch_digest(other) != batch_digest(Batch((SMALL,), {"x": SMALL}, 1))


def test_objects_of_the_users_are_the_same_on_all_ranks() -> None:
    """Their addresses differ from process to process."""

    class Options:
        pass

    assert batch_digest(Batch((SMALL, Options()))) == batch_digest(Batch((SMALL, Options())))


def test_empty_tensors_and_single_numbers_have_digests() -> None:
    digests = {
        batch_digest(Batch((SMALL, each)))
        for each in (torch.zeros(0), torch.zeros(()), torch.ones(()))
    }
    assert len(digests) == 3


def test_the_order_of_batches_counts() -> None:
    assert digest_of_all([1, 2]) != digest_of_all([2, 1])
