"""Parsers of numbers in flags. What they raise becomes a message that names the option."""

from argparse import ArgumentTypeError

_FACTORS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # of numbers of tokens


def is_count(text: str) -> bool:
    """Return whether the text is a whole number of 0 or more, in the digits that people type."""
    return text.isascii() and text.isdecimal()


def count(text: str) -> int:
    """Parse a whole number from 1 on."""
    if not is_count(text) or int(text) < 1:
        raise ArgumentTypeError(f"'{text}' is not a number of 1 or more")
    return int(text)


def token_count(text: str) -> int:
    """Parse a number of tokens: "500k", "2M", "15T" or "65536"."""
    factor = _FACTORS.get(text[-1:], 1)
    number = text if factor == 1 else text[:-1]
    try:
        found = round(float(number) * factor)
    except (OverflowError, ValueError):
        found = 0

    if found < 1:
        raise ArgumentTypeError(f"'{text}' is no number of tokens such as 500k or 2M")
    return found


def degrees(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks: "1,2,4" is (1, 2, 4)."""
    if not all(map(is_count, text.split(","))):
        raise ArgumentTypeError(f"'{text}' are no numbers of ranks such as 1,2,4,8")
    return tuple(sorted({int(part) for part in text.split(",")}))


def microbatch_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of microbatches: "4,8,16"."""
    return tuple(count(part) for part in text.split(","))


def host_range(text: str) -> tuple[int, int]:
    """Parse the fewest and the most hosts: "2:4"."""
    low, _, high = text.partition(":")
    if not (is_count(low) and is_count(high) and 1 <= int(low) <= int(high)):
        raise ArgumentTypeError(f"'{text}' are no numbers of hosts such as 2:4")
    return int(low), int(high)


def names(text: str) -> tuple[str, ...]:
    """Parse names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
