"""Scale the fixed sizes of gradient buckets with all other bytes of the testbed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import planner.cost.network.buckets


@contextmanager
def scaled_buckets(byte_factor: float) -> Iterator[None]:
    """Scale the planner's buckets within the context, for runs and for their predictions."""
    before = planner.cost.network.buckets.LEAST_BUCKET_BYTES, planner.cost.network.buckets.MOST_BUCKET_BYTES
    least, most = (max(1, int(size * byte_factor)) for size in before)
    planner.cost.network.buckets.LEAST_BUCKET_BYTES, planner.cost.network.buckets.MOST_BUCKET_BYTES = least, most
    try:
        yield
    finally:
        planner.cost.network.buckets.LEAST_BUCKET_BYTES, planner.cost.network.buckets.MOST_BUCKET_BYTES = before
