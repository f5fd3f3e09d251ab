"""Codecs: what a receiver reads of a coded message, against plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.executor.communication.messages import layout_of, unpack
from planner.formats.names import CODECS, CodecName
from planner.schedule.instructions import Unit
from tests.executor.communication.test_messages import make_spec, pack

SPECS = [
    make_spec("h", torch.float32, (3, 50)),
    make_spec("ids", torch.int64, (7,)),
    make_spec("mask", torch.bool, ()),
]


def through(codec: CodecName, value: Tensor, **changes: Any) -> Tensor:
    """What arrives of a value."""
    spec = replace(make_spec("h", value.dtype, tuple(value.shape[1:])), **changes)
    layout = layout_of([spec], len(value), CODECS[codec])
    return unpack(layout, pack(layout, Unit(0), {"h": value}))["h"]


def as_int8(value: Tensor) -> Tensor:
    """Round to 255 steps between the extremes of every 256 elements, one block after the other."""
    rounded = []
    for block in torch.split(value.flatten(), 256):
        step = float(block.abs().max().float() / 127) or 1.0
        rounded.append((block / step).round() * step)
    return torch.cat(rounded).view(value.shape)


@pytest.mark.parametrize("samples", [1, 2, 13])
def test_bfloat16_is_rounding(samples: int) -> None:
    value = torch.randn(samples, 3, 50)
    assert torch.equal(through("bfloat16", value), value.bfloat16().float())


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (4, 64), (3, 1000)])
def test_int8_is_the_nearest_of_255_steps_in_its_block(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape) * torch.rand(shape[0], 1) * 100
    got = through("int8", value)
    torch.testing.assert_close(got, as_int8(value), rtol=1e-6, atol=0)
    # stages may hand it on
    torch.testing.assert_close(through("int8", got), got, rtol=1e-6, atol=0)


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    """A run whose gradients overflow must find it out behind the link, too."""
    value = torch.zeros(3, 256)
    value[1, 5], value[2, 7] = math.inf, math.nan
    got = through("int8", value)
    assert not got[0].any()
    assert not got[1:].isfinite().any()


def test_integers_masks_and_values_without_gradient_travel_as_they_are() -> None:
    frozen = replace(make_spec("angles", torch.float32, (40,)), requires_grad=False)
    values = {
        "h": torch.randn(5, 3, 50),
        "ids": torch.randint(0, 9, (5, 7)),
        "mask": torch.rand(5) > 0.5,
        "angles": torch.randn(5, 40),
    }
    for codec in CODECS.values():
        layout = layout_of([*SPECS, frozen], 5, codec)
        got = unpack(layout, pack(layout, Unit(0), values))
        assert all(torch.equal(got[name], values[name]) for name in ("ids", "mask", "angles"))
        assert [got[name].dtype for name in values] == [value.dtype for value in values.values()]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_messages_are_as_large_as_plans_say(codec: CodecName, dtype: torch.dtype) -> None:
    for elements in (1, 2, 100, 256, 257, 5000):
        spec = make_spec("h", dtype, (elements,))
        size = CODECS[codec].size_bytes(elements * dtype.itemsize, dtype.itemsize)
        layout = layout_of([spec], 1, CODECS[codec])
        assert size <= elements * dtype.itemsize
        assert layout.size_bytes == 64 + -(-size // 64) * 64
        value = torch.randn(1, elements).to(dtype)
        got = unpack(layout, pack(layout, Unit(0), {"h": value}))["h"]
        torch.testing.assert_close(got, value, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("codec", CODECS)
def test_order_in_memory_and_expanded_dimensions_survive(codec: CodecName) -> None:
    images = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    got = through(codec, images, order=(0, 2, 3, 1))
    assert got.stride() == images.stride()
    torch.testing.assert_close(got, images, rtol=0.01, atol=0.05)
    heads = torch.randn(2, 1, 40).expand(2, 6, 40)
    got = through(codec, heads, expanded=(1,))
    assert got.stride(1) == 0
    torch.testing.assert_close(got, heads, rtol=0.01, atol=0.05)


def test_ends_with_other_codecs_find_out() -> None:
    checksums = {layout_of(SPECS, 4, codec).checksum for codec in CODECS.values()}
    assert len(checksums) == len(CODECS)
