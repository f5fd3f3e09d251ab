"""What the replicas of a stage do at the end of a round: sum their gradients, update, and exchange the weights.

Where the optimizer's state is sharded (ZeRO-1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, sections 5.1 and 7.2.1), a reduce-scatter leaves each of r replicas the sums of its part, it
updates that part, and an all-gather gives everybody all weights. Both together move the bytes of a ring all-reduce, in
as many steps, because that is made of the same two halves. The reduce-scatter overlaps with the backward as the
all-reduce does; nothing hides the all-gather.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.network.link import Link, ring_all_reduce_s
from planner.cost.work import Floats, Work


def reduce_s(work: Work, replicas: ArrayLike, link: Link) -> Floats:
    """Return the seconds of the all-reduce, or of the reduce-scatter of stages whose optimizer is sharded."""
    whole_s = ring_all_reduce_s(work.trainable_bytes, replicas, link)
    return np.where(work.sharded, whole_s / 2, whole_s) if np.any(work.sharded) else whole_s


def finish_s(work: Work, replicas: ArrayLike, link: Link) -> Floats:
    """Return the seconds of a replica's update, and of the all-gather that follows where the optimizer is sharded."""
    if not np.any(work.sharded):
        return work.update_s
    gather_s = ring_all_reduce_s(work.trainable_bytes, replicas, link) / 2
    return np.where(work.sharded, work.update_s / np.asarray(replicas) + gather_s, work.update_s)
