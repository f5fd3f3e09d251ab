"""Several batch sizes in one argument, and a profile file for each."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_sizes(text: str) -> list[int]:
    """ "8,16,32" -> [8, 16, 32]; for argparse, which turns what is raised into a message."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no batch size such as 32, or several such as 8,16,32") from None
    if len(set(sizes)) < len(sizes):
        raise argparse.ArgumentTypeError(f"'{text}' has the same batch size twice")
    return sizes


def profile_path(path: Path, size: int) -> Path:
    """Where the profile of one of several batch sizes is: profile.json -> profile-b8.json."""
    return path.with_name(f"{path.stem}-b{size}{path.suffix}")
