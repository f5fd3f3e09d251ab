"""When the gradients of a stage can be all-reduced: layers in reverse, bucket by bucket."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cost import buckets
from planner.cost.buckets import bucket_bytes, ready_s
from planner.executor.communication.gradients import chunks
from planner.formats.profile import Layer
from tests.samples import layer

SIXTHS = pytest.approx([4.0, 8.0, 12.0, 16.0, 20.0, 24.0])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", 4)


def made(*weights: tuple[int, int, float]) -> list[Layer]:
    """Layers of so many bytes of gradients, parameters, and seconds of backward."""
    return [
        layer(f"l{index}", backward_s=seconds, weight_bytes=size).model_copy(
            update={"parameters": tuple(f"l{index}.{n}" for n in range(count))}
        )
        for index, (size, count, seconds) in enumerate(weights)
    ]


def test_equal_layers_come_in_equal_parts() -> None:
    assert ready_s(made(*[(1000, 2, 4.0)] * 6)) == SIXTHS


def test_without_gradients_nothing_is_late() -> None:
    assert ready_s(made((0, 0, 24.0))) == SIXTHS


def test_weights_behind_a_long_layer_without_any_come_late() -> None:
    """A classifier whose weight belongs to an earlier stage: its backward comes first, and hands in nothing."""
    late = ready_s(made(*[(1000, 2, 1.0)] * 6, (0, 0, 18.0)))
    assert late == pytest.approx([19.0, 20.0, 21.0, 22.0, 23.0, 24.0])


def test_one_large_weight_is_one_bucket() -> None:
    """It is there when its layer's backward ends; the last part is no earlier than the end of the whole backward."""
    assert ready_s(made((10, 2, 12.0), (10_000, 2, 12.0))) == pytest.approx([12.0] * 5 + [24.0])
    assert ready_s(made((10_000, 2, 12.0), (10, 2, 12.0))) == pytest.approx([24.0] * 6)


def test_a_block_of_many_parameters_hands_them_in_while_its_backward_runs() -> None:
    assert ready_s(made((6000, 12, 24.0))) == SIXTHS


def test_a_copied_weight_is_there_when_its_first_user_is_through() -> None:
    own = made((0, 1, 6.0), (0, 1, 18.0))
    other = layer("elsewhere", weight_bytes=1000).model_copy(update={"parameters": ("l1.0",)})
    assert ready_s(own, [other]) == pytest.approx([18.0] * 5 + [24.0])
    assert ready_s(own, [other.model_copy(update={"parameters": ("l0.0", "l1.0")})]) == pytest.approx([24.0] * 6)


def test_small_buckets_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", 10_000)
    assert bucket_bytes(6000) == 10_000
    assert ready_s(made(*[(1000, 2, 4.0)] * 6)) == pytest.approx([24.0] * 6)


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5, 5, 5), (1, 2, 3, 40, 5, 6), (50, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 50)])
def test_the_parts_are_ready_when_the_executors_buckets_are_full(sizes: tuple[int, ...]) -> None:
    """One parameter per layer: the bucket with the last byte of each part ends with a layer, whose backward is over."""
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    found = chunks(parameters)
    total = sum(sizes)
    ends: list[int] = []
    for chunk in found:
        ends.append((ends[-1] if ends else 0) + sum(p.numel() for p in chunk))
    position = {id(p): index for index, p in enumerate(parameters[::-1])}
    expected = []
    for part in range(6):
        bucket = next(index for index, end in enumerate(ends) if 6 * end >= total * (part + 1))
        expected.append(6.0 if part == 5 else position[id(found[bucket][-1])] + 1.0)
    assert ready_s(made(*((4 * size, 1, 1.0) for size in sizes))) == pytest.approx(expected)


def test_what_recomputes_within_the_backward_delays_what_comes_after_it() -> None:
    layers = made(*[(1000, 2, 4.0)] * 6)
    # The forward of layers 2 and 3 runs again, 3 s, before the backward of layer 3, the third from the end.
    assert ready_s(layers, again_s={3: 3.0}) == pytest.approx([4, 8, 15, 19, 23, 27])
