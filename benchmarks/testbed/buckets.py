"""Gradients are all-reduced in buckets of fixed sizes: on the testbed those shrink with all other bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import planner.buckets


@contextmanager
def scaled_buckets(byte_factor: float) -> Iterator[None]:
    """The planner's buckets are so much smaller inside the block: for runs, and for what is predicted of them."""
    before = planner.buckets.LEAST_BUCKET_BYTES, planner.buckets.MOST_BUCKET_BYTES
    least, most = (max(1, int(size * byte_factor)) for size in before)
    planner.buckets.LEAST_BUCKET_BYTES, planner.buckets.MOST_BUCKET_BYTES = least, most
    try:
        yield
    finally:
        planner.buckets.LEAST_BUCKET_BYTES, planner.buckets.MOST_BUCKET_BYTES = before
