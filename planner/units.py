"""Parse and format quantities with units, at the edge: inside, all is bytes, seconds and bytes per
second.

GB = 10^9 bytes, GiB = 2^30 bytes; `bps` counts bits, `B/s` counts bytes.
"""

import math
import re

from planner.errors import UnitError

# A search adds up running sums, the cost model adds up the layers of a stage: the same time may
# differ in the last bits. Relative to a time (or in replicas and GPUs, which are small numbers)
# this is far above what rounding does in sums of thousands of layers, and far below any difference
# between plans that matters. Where a search rounds with it, it rounds towards too many plans, and
# the cost model itself decides.
SLACK = 1e-9


_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_PREFIX = _DECIMAL | {"K": 10**3} | _BINARY
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NEARLY = 0.9995  # of a unit is one of it, in three digits
_NUMBER = r"(-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of "10Gbps", "10Gbit/s" (bits) or "1.25GB/s" (bytes); raise
    UnitError for others.
    """
    match = re.fullmatch(_NUMBER + r"\s*([KMGTk]i?)?(bps|bit/s|b/s|B/s|Bps)", text.strip())
    if match is None:
        raise UnitError(
            f"bandwidth '{text}' is not a rate",
            hint="write bits per second as 10Gbps or bytes per second as 1.25GB/s",
        )

    number, prefix, unit = match.groups()
    return _positive(
        float(number) * _PREFIX[prefix or ""] / (1 if unit in ("B/s", "Bps") else 8),
        "bandwidth",
        text,
    )


def parse_bytes(text: str) -> int:
    """Return the bytes of "16GB" (16·10^9) or "16GiB" (16·2^30); raise UnitError without a unit and
    for 0.
    """
    match = re.fullmatch(_NUMBER + r"\s*([KMGTk]i?)?B", text.strip())
    if match is None:
        raise UnitError(
            f"size '{text}' is not a number of bytes", hint="write 16GB (10^9) or 16GiB (2^30)"
        )
    number, prefix = match.groups()
    return round(_positive(float(number) * _PREFIX[prefix or ""], "size", text))


def parse_seconds(text: str) -> float:
    """Return the seconds of "50us", "0.1ms", "2s" or "0s"; raise UnitError without a unit and below
    0.
    """
    match = re.fullmatch(_NUMBER + r"\s*(s|ms|us|µs|ns)", text.strip())
    if match is None or match[1].startswith("-"):
        what = "has no unit" if match is None else "is negative"
        raise UnitError(f"time '{text}' {what}", hint="write 50us, 0.1ms or 2s")
    return float(match[1]) * _TIME[match[2]]


def counted(count: int, what: str) -> str:
    """Return a number of things for people: "1 server", "2 servers"."""
    return f"{count} {what}{'s' * (count != 1)}"


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth for people, in bits per second: 1.25e9 -> "10 Gbps"."""
    return _scaled(bytes_per_s * 8, "bps")


def format_bytes(count: float) -> str:
    """Return bytes for people, with decimal prefixes: 1_500_000 -> "1.5 MB"."""
    return _scaled(count, "B")


def format_memory(limit: int) -> str:
    """Return the memory of a device for people, in the unit of its maker: 16·2^30 -> "16 GiB",
    16·10^9 -> "16 GB".
    """
    if limit < 2**30 or limit % 2**20:
        return format_bytes(limit)
    return f"{limit / 2**30:.1f}".removesuffix(".0") + " GiB"


def format_flops(count: float) -> str:
    """Return floating point operations for people: 1_500_000 -> "1.5 MFLOP"."""
    return _scaled(count, "FLOP")


def format_seconds(seconds: float) -> str:
    """Return seconds for people: 0.0123 -> "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size * _NEARLY:
            return f"{_digits(seconds / size)} {unit}"
    if not seconds:
        return "0 s"
    return f"{_digits(seconds / 1e-9)} ns"


def format_rate(per_s: float) -> str:
    """Return a number per second for people: 12345.6 -> "12,346", 1.23456 -> "1.235"."""
    if per_s >= 1000:
        return f"{per_s:,.0f}"
    return f"{per_s:.4g}"


def format_times(ratio: float) -> str:
    """Return a speed-up for people: 1.234 -> "1.23x"; below a hundredth and beyond a thousand
    digits say nothing.
    """
    if ratio >= 1000:
        return "more than 1,000x"
    if ratio >= 0.01:
        return f"{ratio:.2f}x"
    return "less than 0.01x"


def format_count(number: float) -> str:
    """Return a large number for people: 15e12 -> "15T", 250_000 -> "250k"."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size * _NEARLY:
            return f"{_digits(number / size)}{letter}"
    return f"{number:.0f}"


def format_days(days: float) -> str:
    """Return a number of days for people: 1234.5 -> "1,234", 0.0123 -> "0.0123"."""
    return f"{days:,.0f}" if days >= 1000 * _NEARLY else _digits(days)


def format_dollars(dollars: float) -> str:
    """Return a sum of money for people, to three digits: 1_234_567 -> "$1,230,000"."""
    if dollars < 1000 * _NEARLY:
        return f"${_digits(dollars)}"
    step = 10 ** (math.floor(math.log10(dollars)) - 2)
    return f"${round(dollars / step) * step:,}"


def as_fast(ratio: float) -> str:
    """Return a ratio of speeds for a sentence: 1.234 -> "1.23 times as fast", 1.001 -> "as
    fast".
    """
    times = format_times(ratio)
    if times == "1.00x":
        return "as fast"
    return f"{times.removesuffix('x')} times as fast"


def _scaled(value: float, unit: str) -> str:
    prefix, size = max(
        ((prefix, size) for prefix, size in _DECIMAL.items() if abs(value) >= size * _NEARLY),
        key=lambda pair: pair[1],
        default=("", 1),
    )
    return f"{_digits(value / size)} {prefix}{unit}"


def _digits(value: float) -> str:
    """Return the number with three digits, never as 1e+03."""
    if abs(value) >= 999.5:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _positive(value: float, what: str, text: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise UnitError(
            f"{what} '{text}' is not a positive, finite quantity", hint="give one above 0"
        )
    return value
