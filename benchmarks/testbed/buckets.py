"""Scale the fixed sizes of gradient buckets with all other bytes of the testbed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import planner.cost.network.link


@contextmanager
def scaled_buckets(byte_factor: float) -> Iterator[None]:
    """Scale the planner's buckets within the context, for runs and for their predictions."""
    before = (
        planner.cost.network.link.LEAST_BUCKET_BYTES,
        planner.cost.network.link.MOST_BUCKET_BYTES,
    )
    least, most = (max(1, int(size * byte_factor)) for size in before)
    planner.cost.network.link.LEAST_BUCKET_BYTES, planner.cost.network.link.MOST_BUCKET_BYTES = (
        least,
        most,
    )
    try:
        yield
    finally:
        (
            planner.cost.network.link.LEAST_BUCKET_BYTES,
            planner.cost.network.link.MOST_BUCKET_BYTES,
        ) = before
