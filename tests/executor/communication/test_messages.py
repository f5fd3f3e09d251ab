"""Messages: what goes in comes out, and the wrong message is an error."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from planner.errors import WorkerError
from planner.executor.communication.links import Posted
from planner.executor.communication.messages import (
    Layout,
    Outgoing,
    check,
    header,
    header_here,
    layout_of,
)
from planner.executor.communication.messages import unpack as values_in
from planner.model.capture.graph import ValueSpec
from planner.model.capture.size import BATCH
from planner.schedule.instructions import ReceiveActivation, Unit

CPU = torch.device("cpu")


def make_spec(
    name: str, dtype: torch.dtype, rest: tuple[int, ...], order: tuple[int, ...] | None = None
) -> ValueSpec:
    """A value of `rest` elements per sample, contiguous unless `order` says otherwise."""
    sizes = (BATCH, *rest)
    return ValueSpec(name, dtype, dtype.is_floating_point, sizes, order or tuple(range(len(sizes))))


def pack(layout: Layout, unit: Unit, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a sender does."""
    message = Outgoing(layout, CPU)
    message.fill(unit, values)
    return message.buffer


def unpack(
    layout: Layout, unit: Unit, buffer: torch.Tensor, sender: int
) -> dict[str, torch.Tensor]:
    """What a receiver does."""
    check(layout, unit, header_here(buffer), sender)
    return values_in(layout, buffer)


SPECS = [
    make_spec("h", torch.float32, (3, 5)),
    make_spec("mask", torch.bool, (7,)),
    make_spec("ids", torch.int64, ()),
]


def make_values(batch_size: int) -> dict[str, torch.Tensor]:
    return {
        "h": torch.randn(batch_size, 3, 5),
        "mask": torch.rand(batch_size, 7) > 0.5,
        "ids": torch.randint(0, 99, (batch_size,)),
    }


@pytest.mark.parametrize("batch_size", [1, 4, 13])
def test_values_of_mixed_types_survive_the_trip(batch_size: int) -> None:
    layout = layout_of(SPECS, batch_size)
    values = make_values(batch_size)
    got = unpack(layout, Unit(7, 2), pack(layout, Unit(7, 2), values), 0)
    assert list(got) == ["h", "mask", "ids"]
    for name, value in values.items():
        assert torch.equal(got[name], value)
        assert got[name].data_ptr() % 64 == pack(layout, Unit(7, 2), values).data_ptr() % 64


def test_a_message_does_not_change_with_its_source() -> None:
    layout = layout_of(SPECS, 2)
    values = make_values(2)
    message = pack(layout, Unit(0), values)
    before = values["h"].clone()
    values["h"].zero_()
    assert torch.equal(unpack(layout, Unit(0), message, 0)["h"], before)


def test_a_value_arrives_in_its_memory_order() -> None:
    """Channels last, as after some convolutions: kernels downstream would round differently on a
    contiguous copy.
    """
    layout = layout_of([make_spec("image", torch.float32, (3, 4, 5), order=(0, 2, 3, 1))], 2)
    value = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got = unpack(layout, Unit(0), pack(layout, Unit(0), {"image": value}), 0)["image"]
    assert torch.equal(got, value)
    assert got.stride() == value.stride()


def test_another_minibatch_is_an_error_that_names_both() -> None:
    layout = layout_of(SPECS, 2)
    message = pack(layout, Unit(3), make_values(2))
    with pytest.raises(WorkerError, match=r"rank 5 sent minibatch 3, .* expected minibatch 4"):
        unpack(layout, Unit(4), message, 5)


def test_another_layout_is_an_error() -> None:
    message = pack(layout_of(SPECS, 2), Unit(3), make_values(2))
    other = layout_of([SPECS[1], SPECS[0], SPECS[2]], 2)
    with pytest.raises(WorkerError, match="layout"):
        unpack(other, Unit(3), message, 5)


def test_a_value_of_unexpected_shape_is_refused_before_it_is_sent() -> None:
    layout = layout_of(SPECS, 2)
    with pytest.raises(WorkerError, match=r"value 'h' is torch.float32 of shape \(3, 3, 5\)"):
        pack(layout, Unit(0), make_values(3))


def test_what_is_expanded_travels_once() -> None:
    """Key-value heads that several heads share, a mask for all samples: the copy repeats memory as
    the value did.
    """
    spec = replace(make_spec("keys", torch.float32, (6, 5, 4), order=(0, 1, 2, 3)), expanded=(1,))
    value = torch.randn(2, 1, 5, 4).expand(2, 6, 5, 4)
    layout = layout_of([spec], 2)
    assert layout.size_bytes == 64 + -(-2 * 5 * 4 * 4 // 64) * 64
    got = unpack(layout, Unit(0), pack(layout, Unit(0), {"keys": value}), 0)["keys"]
    assert torch.equal(got, value)
    assert got.stride() == value.stride()
    # Its gradient differs from head to head.
    gradient = torch.randn(2, 6, 5, 4)
    layout = layout_of([spec.of_gradient], 2)
    got = unpack(layout, Unit(0), pack(layout, Unit(0), {"keys": gradient}), 0)["keys"]
    assert torch.equal(got, gradient)


def test_what_is_expanded_may_have_no_samples() -> None:
    """A mask for all samples of a microbatch without any, as the last minibatch of an epoch may
    have.
    """
    spec = replace(make_spec("mask", torch.float32, (5, 4), order=(0, 1, 2)), expanded=(0,))
    layout = layout_of([spec], 0)
    got = unpack(layout, Unit(0), pack(layout, Unit(0), {"mask": torch.zeros(0, 5, 4)}), 0)["mask"]
    assert got.shape == (0, 5, 4)


def test_another_batch_size_is_an_error() -> None:
    """gloo fills the beginning of a buffer that is larger than the message, without a word."""
    sent = pack(layout_of(SPECS, 2), Unit(3), make_values(2))
    layout = layout_of(SPECS, 3)
    received = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    received[: len(sent)] = sent
    with pytest.raises(WorkerError, match="layout"):
        unpack(layout, Unit(3), received, 5)


def test_another_dtype_of_the_same_size_is_an_error() -> None:
    message = pack(
        layout_of([make_spec("h", torch.float32, (4,))], 2), Unit(3), {"h": torch.ones(2, 4)}
    )
    with pytest.raises(WorkerError, match="layout"):
        unpack(layout_of([make_spec("h", torch.int32, (4,))], 2), Unit(3), message, 5)


def test_another_microbatch_and_a_message_of_somebody_else_are_errors() -> None:
    layout = layout_of(SPECS, 2)
    message = pack(layout, Unit(3, 1), make_values(2))
    with pytest.raises(WorkerError, match=r"microbatch 1, .* microbatch 0"):
        unpack(layout, Unit(3, 0), message, 5)
    with pytest.raises(WorkerError, match="rank 5 sent"):
        unpack(layout, Unit(3, 1), torch.zeros_like(message), 5)


def test_a_message_that_has_left_is_filled_again() -> None:
    layout = layout_of(SPECS, 2)
    message = Outgoing(layout, CPU)
    for minibatch in range(3):
        values = make_values(2)
        message.fill(Unit(minibatch), values)
        assert int(header(message.buffer)) == header_here(message.buffer)
        got = unpack(layout, Unit(minibatch), message.buffer, 0)
        assert all(torch.equal(got[name], value) for name, value in values.items())


def test_a_check_that_comes_later_knows_what_was_expected_and_holds_no_buffer() -> None:
    layout = layout_of(SPECS, 2)
    message = pack(layout, Unit(3), make_values(2))
    posted = Posted(ReceiveActivation(1, Unit(4), 0, 5), layout, message, dist.Work())
    word, held = header(message).clone(), weakref.ref(message)
    later = posted.later_check()
    del posted, message
    assert held() is None
    with pytest.raises(WorkerError, match=r"rank 5 sent minibatch 3, .* expected minibatch 4"):
        later(word)
