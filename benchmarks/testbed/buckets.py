"""Gradients are all-reduced in buckets of fixed sizes: on the testbed those shrink with all other bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import planner.cost.buckets


@contextmanager
def scaled_buckets(byte_factor: float) -> Iterator[None]:
    """The planner's buckets are so much smaller inside the block: for runs, and for what is predicted of them."""
    before = planner.cost.buckets.LEAST_BUCKET_BYTES, planner.cost.buckets.MOST_BUCKET_BYTES
    least, most = (max(1, int(size * byte_factor)) for size in before)
    planner.cost.buckets.LEAST_BUCKET_BYTES, planner.cost.buckets.MOST_BUCKET_BYTES = least, most
    try:
        yield
    finally:
        planner.cost.buckets.LEAST_BUCKET_BYTES, planner.cost.buckets.MOST_BUCKET_BYTES = before
