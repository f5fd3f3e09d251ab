"""Batches: nested, split, collated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.errors import ModelFileError
from planner.model.batch import Batch, collate, make_batch
from tests.runtimes import PretendedDevice, registered


def _batch(size: int) -> Batch:
    images = torch.arange(size * 2.0).view(size, 2)
    return Batch(
        (images, {"mask": torch.ones(size)}),
        {"scale": torch.tensor(3.0), "name": "x"},
        [torch.arange(size)],
    )


def test_split_keeps_order_and_what_has_no_samples() -> None:
    parts = _batch(7).split(3)
    assert [part.size for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part.args[0] for part in parts]), _batch(7).args[0])
    assert torch.equal(torch.cat([part.target[0] for part in parts]), torch.arange(7))
    assert all(part.kwargs["name"] == "x" and part.kwargs["scale"] == 3 for part in parts)
    assert parts[1].args[1]["mask"].shape == (2,)


@pytest.mark.parametrize("parts", [0, 8])
def test_no_empty_parts(parts: int) -> None:
    with pytest.raises(ModelFileError, match=f"7 samples cannot be split into {parts}"):
        _batch(7).split(parts)


def test_distinct_takes_tensors_that_occur_twice_apart() -> None:
    tokens = torch.arange(3)
    batch = Batch((tokens,), {"mask": torch.ones(3)}, tokens).distinct()
    assert batch.args[0] is tokens
    assert batch.target is not tokens
    assert torch.equal(batch.target, tokens)


def test_doubled_holds_every_sample_twice() -> None:
    twice = _batch(1).doubled()
    assert twice.size == 2
    assert torch.equal(twice.args[0][0], twice.args[0][1])
    assert twice.kwargs["scale"] == 3


def test_keyword_order_does_not_matter() -> None:
    one = Batch((), {"a": torch.zeros(2), "b": torch.ones(2)})
    other = Batch((), {"b": torch.ones(2), "a": torch.zeros(2)})
    assert one.flatten()[1] == other.flatten()[1]
    assert all(
        torch.equal(x, y) for x, y in zip(one.flatten()[0][:2], other.flatten()[0][:2], strict=True)
    )


def test_to_moves_tensors_only() -> None:
    moved = _batch(2).to("meta")
    assert moved.args[1]["mask"].device.type == "meta"
    assert moved.kwargs["name"] == "x"


def test_a_batch_that_is_there_already_is_not_made_again() -> None:
    batch = _batch(2)
    assert batch.to("cpu") is batch
    leaves, spec = batch.flatten()
    leaves.clear()  # a caller's own
    assert batch.flatten()[0]
    assert batch.flatten()[1] == spec


def test_collate_items_with_and_without_keywords() -> None:
    plain = collate([(torch.full((2,), float(i)), i) for i in range(3)])
    assert plain.args[0].shape == (3, 2)
    assert torch.equal(plain.target, torch.arange(3))
    named = collate([((), {"x": torch.zeros(2)}, None) for _ in range(3)])
    assert named.args == ()
    assert named.kwargs["x"].shape == (3, 2)
    assert named.target is None


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(torch.zeros(2), 1), (torch.zeros(3), 1)], "cannot be stacked"),
        ([torch.zeros(2)], "returned a Tensor"),
        ([(1, 2, 3, 4)], "returned a tuple of 4"),
        ([("text", 1)], r"not \(args, target\)"),
        ([((1,), [1], 1)], r"not \(args, target\)"),
    ],
)
def test_items_that_make_no_batch(items: list[Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        collate(items)


def test_a_lone_tensor_is_one_argument() -> None:
    assert len(make_batch((torch.zeros(2, 2), torch.zeros(2)), "here").args) == 1


def test_a_batch_without_tensors_has_no_size() -> None:
    with pytest.raises(ModelFileError, match="no tensor with a batch dimension"):
        _ = Batch((torch.tensor(1.0),), {}, None).size


def test_pinned_tensors_are_those_with_memory_of_their_own() -> None:
    """A copy to an expanded tensor would write one element many times."""
    whole, mask = torch.randn(3, 4), torch.ones(4).expand(3, 4)
    batch = Batch((whole, mask), {"text": "a"}, torch.arange(3))
    with registered("cuda", PretendedDevice()):
        found = batch.pinned(torch.device("cuda"))
    assert found.args[1] is mask
    assert found.args[0] is not whole
    assert found.target is not batch.target
    assert torch.equal(found.args[0], whole)
    assert found.kwargs == {"text": "a"}
    assert batch.to("cpu") is batch


def test_a_dict_has_arguments_by_name() -> None:
    words, labels = torch.arange(6).view(3, 2), torch.arange(3)
    batch = make_batch(({"words": words}, labels), "example_batch()")
    assert (batch.args, batch.kwargs) == ((), {"words": words})
    assert batch.target is labels
    items = [{"words": word, "labels": label} for word, label in zip(words, labels, strict=True)]
    whole = collate(items)
    assert whole.target is None
    assert torch.equal(whole.kwargs["words"], words)
    assert torch.equal(whole.kwargs["labels"], labels)
