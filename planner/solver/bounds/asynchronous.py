"""Bounds of the asynchronous pipeline (1f1b) under the resource model."""

from __future__ import annotations

import numpy as np

from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.network.link import BUCKETS, Link
from planner.cost.rounding import SLACK
from planner.cost.work import Floats, Work
from planner.solver.bounds.bounds import Bounds, larger_root


class AsynchronousBounds(AsynchronousModel, Bounds):
    """See `AsynchronousModel` for the formulas."""

    prices_shards = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.more_is_faster = link.latency_s == 0

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        bandwidth, latency = self.link.bandwidth_bytes_per_s, self.link.latency_s
        ring_s = 2 * work.trainable_bytes / self.link.ring_bytes_per_s
        busier_s = np.maximum(
            work.received_bytes / bandwidth + work.received_messages * latency,
            work.sent_bytes / bandwidth + work.sent_messages * latency,
        )
        # T·r² - (x + 2W/B)·r + 2W/B >= 0, whose left side grows from r = 2 on.
        link = larger_root(target_s, busier_s + ring_s, ring_s)
        base_s = self._processor_s(work)
        simple = np.maximum((base_s + work.backward_s) / target_s, link)
        # (x + p·AR) / r <= T, with AR's latency 2(r-1)a: (T - 2ap)·r² - (x + 2pW/B - 2ap)·r + 2pW/B >= 0, both for the
        # backward with the last part of AR and for AR alone. Below 2ap the parabola opens downwards: fewer replicas
        # are better, so `simple` is the only candidate.
        steps_s = np.where(work.trainable_bytes > 0, 2 * latency, 0.0)
        both = simple
        for backward_part, reduce_part in ((1.0, 1 / BUCKETS), (0.0, 1.0)) if self.link.overlap else ((1.0, 1.0),):
            own_s, ring_part_s, step_s = (
                base_s + backward_part * work.backward_s,
                reduce_part * ring_s,
                reduce_part * steps_s,
            )
            both = np.maximum(both, larger_root(target_s - step_s, own_s + ring_part_s - step_s, ring_part_s))
        return [simple, both] if latency > 0 else [both]  # without latency more replicas never hurt

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Return the processor's seconds without latency and messages: with Bw and the last part of AR, and with AR."""
        ring_s = 2 * (replicas - 1) / replicas * work.trainable_bytes / self.link.ring_bytes_per_s
        part = 1 / BUCKETS if self.link.overlap else 1.0
        base_s = work.forward_s + work.recompute_s + work.update_s
        sums = [base_s + work.backward_s + part * ring_s]
        if replicas > 1 and part < 1:
            sums.append(base_s + ring_s)
        return sums

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Return the fewest GPUs that have time to send all values over the cut, and to receive them."""
        busier = np.maximum(output_bytes, gradient_bytes) / (self.link.bandwidth_bytes_per_s * target_s)
        fewest = np.ceil(busier * (1 - SLACK))
        return fewest, fewest
