"""PipeDream's notation for a plan, "7-1": replicas per stage."""

from __future__ import annotations

from itertools import zip_longest

LONGEST_CONFIG = 40  # characters of a config in tables and sentences


def config_of(replicas: tuple[int, ...], chunks: int = 1, degrees: tuple[int, ...] = ()) -> str:
    """Return PipeDream's notation, replicas per stage: (7, 1) is "7-1"; (1, 1, 1) is "1-1-1", a straight pipeline.

    A replica that is a group of ranks says how many: "2x4-1x8" is two groups of four, then one of eight.

    Where workers run several stages each, their chunks of the model, every worker counts once: (8, 8, 8, 8) with two
    chunks is "8-8 x2 chunks", on 16 GPUs.
    """
    counts = zip_longest(replicas[: len(replicas) // chunks], degrees[: len(replicas) // chunks], fillvalue=1)
    once = "-".join(f"{r}x{t}" if t > 1 else str(r) for r, t in counts)
    return f"{once} x{chunks} chunks" if chunks > 1 else once


def short_config(config: str, longest: int = LONGEST_CONFIG) -> str:
    """Shorten a long config to its ends: "1-1-...-1 (56 stages)"; chunks of one worker count as one stage."""
    if len(config) <= longest:
        return config
    once, _, chunks = config.partition(" ")
    parts = once.split("-")
    tail = " ".join(word for word in (f"...-{parts[-1]}", chunks, f"({len(parts)} stages)") if word)
    return once[: once.rindex("-", 0, longest - len(tail)) + 1] + tail
