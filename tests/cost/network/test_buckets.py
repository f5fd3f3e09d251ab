"""When the gradients of a stage can be all-reduced: layers in reverse, bucket by bucket."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cost.network import link as buckets
from planner.cost.network.link import Buckets, bucket_bytes, buckets_of
from planner.executor.communication.gradients import chunks
from planner.formats.profile import Layer
from tests.samples import layer

SIXTHS = ([4.0, 8.0, 12.0, 16.0, 20.0, 24.0], [1 / 6] * 6)


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


def check(found: Buckets, expected: tuple[list[float], list[float]]) -> None:
    assert found.ready_s == pytest.approx(expected[0])
    assert found.shares == pytest.approx(expected[1])


def test_equal_layers_fill_equal_buckets() -> None:
    check(buckets_of(made(*[(1000, 2, 4.0)] * 6)), SIXTHS)


def test_without_gradients_nothing_is_late() -> None:
    check(buckets_of(made((0, 0, 24.0))), SIXTHS)


def test_weights_behind_a_long_layer_without_any_come_late() -> None:
    """A classifier whose weight belongs to an earlier stage: its backward comes first, and hands in
    nothing.
    """
    check(
        buckets_of(made(*[(1000, 2, 1.0)] * 6, (0, 0, 18.0))),
        ([19.0, 20.0, 21.0, 22.0, 23.0, 24.0], [1 / 6] * 6),
    )


def test_one_large_weight_is_one_bucket() -> None:
    """It is there when its layer's backward ends; what comes after it may be little, or nothing."""
    check(
        buckets_of(made((10, 2, 12.0), (10_000, 2, 12.0))),
        ([12.0, 24.0], [10_000 / 10_010, 10 / 10_010]),
    )
    check(buckets_of(made((10_000, 2, 12.0), (10, 2, 12.0))), ([24.0], [1.0]))
    check(buckets_of(made((0, 0, 12.0), (10_000, 2, 12.0))), ([12.0, 24.0], [1.0, 0.0]))


def test_a_block_of_many_parameters_hands_them_in_while_its_backward_runs() -> None:
    check(buckets_of(made((6000, 12, 24.0))), SIXTHS)


def test_a_copied_weight_is_there_when_its_first_user_is_through() -> None:
    own = made((0, 1, 6.0), (0, 1, 18.0))
    other = layer("elsewhere", weight_bytes=1000).model_copy(update={"parameters": ("l1.0",)})
    check(buckets_of(own, [other]), ([18.0, 24.0], [1.0, 0.0]))
    check(
        buckets_of(own, [other.model_copy(update={"parameters": ("l0.0", "l1.0")})]),
        ([24.0], [1.0]),
    )


def test_small_buckets_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", 10_000)
    assert bucket_bytes(6000) == 10_000
    check(buckets_of(made(*[(1000, 2, 4.0)] * 6)), ([24.0], [1.0]))


def test_of_many_buckets_the_first_and_the_last_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "MOST_BUCKET_BYTES", 1000)
    assert bucket_bytes(20_000) == 1000
    found = buckets_of(made(*[(1000, 2, 1.0)] * 20))
    check(found, ([1.0, 4.0, 7.0, 10.0, 13.0, 16.0, 19.0, 20.0], [1 / 20, *[3 / 20] * 6, 1 / 20]))


def test_the_all_reduce_ends_as_late_as_its_buckets_let_it() -> None:
    few = Buckets((4.0, 10.0, 24.0), (0.5, 0.25, 0.25))
    assert few.reduced_s(8.0) == 26.0  # the last bucket after the backward
    assert few.reduced_s(80.0) == 84.0  # all of it, from the first bucket on


@pytest.mark.parametrize(
    "sizes", [(5, 5, 5, 5, 5, 5), (1, 2, 3, 40, 5, 6), (50, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 50)]
)
def test_buckets_are_those_of_the_executor(sizes: tuple[int, ...]) -> None:
    """One parameter per layer, whose gradient is complete when its layer's backward is over."""
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    position = {id(p): index for index, p in enumerate(parameters[::-1])}
    found = chunks(parameters)
    ready = [position[id(chunk[-1])] + 1.0 for chunk in found]
    shares = [sum(p.numel() for p in chunk) / sum(sizes) for chunk in found]
    check(buckets_of(made(*((4 * size, 1, 1.0) for size in sizes))), (ready, shares))


def test_what_recomputes_within_the_backward_delays_what_comes_after_it() -> None:
    layers = made(*[(1000, 2, 4.0)] * 6)
    # The forward of layers 2 and 3 runs again, 3 s, before the backward of layer 3, the third from
    # the end.
    check(buckets_of(layers, again_s={3: 3.0}), ([4, 8, 15, 19, 23, 27], [1 / 6] * 6))
