"""Quantities with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import UnitError
from planner.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_days,
    format_dollars,
    format_memory,
    format_seconds,
    format_times,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Gbps", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("1.25GB/s", 1.25e9),
        ("800Mb/s", 1e8),
        ("1GiB/s", 2**30),
        ("8bps", 1),
    ],
)
def test_bandwidth_tells_bits_from_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["10Gb", "10G", "10", "", "Gbps", "-1Gbps", "0Gbps", "1e999Gbps", "nanGbps", "10gbps"]
)
def test_bandwidth_without_a_clear_meaning_is_refused(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bandwidth(text)
    assert repr(text)[1:-1] in caught.value.message


@pytest.mark.parametrize(
    ("text", "count"), [("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("2.01kB", 2010), ("7B", 7)]
)
def test_sizes_are_decimal_unless_marked_binary(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["16", "16G", "16Gb", "0GB", "-1GB", "GB", "16 GB/s"])
def test_sizes_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 5e-5), ("50µs", 5e-5), ("0.1ms", 1e-4), ("2s", 2), ("0s", 0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["50", "50m", "-1s", "us"])
def test_times_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_seconds(text)


@given(st.floats(1, 1e15))
def test_what_is_shown_reads_back_to_three_digits(value: float) -> None:
    assert parse_bandwidth(format_bandwidth(value)) == pytest.approx(value, rel=6e-3)
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=6e-3, abs=1)


@given(st.floats(1e-9, 1e6))
def test_times_shown_read_back_to_three_digits(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=6e-3)


def test_zero_and_small_values_show() -> None:
    assert format_seconds(0) == "0 s"
    assert format_bytes(0) == "0 B"
    assert format_bytes(999_999) == "1 MB"
    limits = (16 * 2**30, 16138 * 2**20, 16 * 10**9, 0)
    assert [format_memory(limit) for limit in limits] == ["16 GiB", "15.8 GiB", "16 GB", "0 B"]
    assert format_bandwidth(124.99) == "1 kbps"
    assert format_seconds(0.9999) == "1 s"
    assert [format_times(ratio) for ratio in (2e9, 1.234, 1e-9)] == [
        "more than 1,000x",
        "1.23x",
        "less than 0.01x",
    ]
    assert format_seconds(123456) == "123456 s"


@pytest.mark.parametrize(
    ("number", "text"),
    [(15e12, "15T"), (999_600, "1M"), (250_000, "250k"), (1.234e9, "1.23B"), (12, "12")],
)
def test_large_numbers_have_a_letter(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("days", "text"), [(1234.4, "1,234"), (999.7, "1,000"), (12.34, "12.3"), (0.01234, "0.0123")]
)
def test_days_have_three_digits_at_least(days: float, text: str) -> None:
    assert format_days(days) == text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [(1_234_567, "$1,230,000"), (999.7, "$1,000"), (12.34, "$12.3"), (49_250, "$49,200")],
)
def test_money_has_three_digits(dollars: float, text: str) -> None:
    assert format_dollars(dollars) == text
