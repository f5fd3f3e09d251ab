"""The time of pipelines that never drain, 1f1b and 2bw: every replica's processor and links in the
steady state.

Legend: F forward, Bw backward, U update, R recomputation seconds; W trainable bytes; r replicas; B
    bytes/s;
a latency in s;  A seconds of accumulating gradients.
"""

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.models.cost_model import StageModel, ending_s, finish_s, reduce_s, transfer_s
from planner.cost.network.link import Link, backward_and_reduce_s
from planner.cost.network.topology import Busy, Placement
from planner.cost.work import Floats, Work


class AsynchronousModel(StageModel):
    """Busy time of each replica's processor and link, per minibatch. The default, because it
    matches measurements.

        compute        (F + R + U + max(Bw + AR/n, AR)) / r
        link, each way (activations + gradients) / (r·B) + 2(r-1)·W / (r²·B) + a·messages / r

    AR is the ring all-reduce in n buckets. Where the processors themselves move the messages
    nothing overlaps, and the processor's time is (F + R + U + Bw + AR + bytes received and sent /
    2B) / r.
    """

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """See base class."""
        r = np.asarray(replicas, dtype=np.float64)
        receive_s, send_s = transfer_s(work, self.link)
        ring_s = 2 * (r - 1) / (r * r) * work.trainable_bytes / self.link.ring_bytes_per_s
        backward_s = backward_and_reduce_s(work.backward_s, reduce_s(work, r, self.link), self.link)
        compute_s = (self._processor_s(work, r) + backward_s) / r
        return {
            "compute": compute_s,
            "receive": receive_s / r + ring_s,
            "send": send_s / r + ring_s,
        }

    def _processor_s(self, work: Work, replicas: ArrayLike = 1.0) -> Floats:
        handling_s = self.link.handling_s(work.received_bytes + work.sent_bytes)
        return work.forward_s + work.recompute_s + finish_s(work, replicas, self.link) + handling_s

    def placed_s(self, placement: Placement) -> list[Busy]:
        """See base class."""
        loads, _ = placement.transfers()
        for ranks, work in zip(placement.ranks, placement.works, strict=True):
            loads.add_ring(ranks, float(work.trainable_bytes))
        busy: list[Busy] = []
        for ranks, work in zip(placement.ranks, placement.works, strict=True):
            placed = AsynchronousModel(placement.topology.stage_link(ranks))
            receive_s, send_s = loads.busiest(ranks)
            compute_s = placed.resources_s(work, len(ranks))["compute"]
            busy.append(
                {"compute": compute_s, "receive": np.asarray(receive_s), "send": np.asarray(send_s)}
            )

        placement.add_shared(busy, loads, 1)
        return busy


class DoubleBufferedModel(AsynchronousModel):
    """Busy time of each replica's processor and link per minibatch of m microbatches; the busiest
    runs n = ceil(m / r).

        compute         n·(F + R + Bw) + (n-1)·A + U + max(AR/6, AR - Bw)
        link, each way  n·(activations + gradients) / B + 2(r-1)·W / (r·B) + a·n·messages

    Bw in the maximum is the last backward, with its A. With m = r this is the time of a round of
    1f1b.
    """

    def __init__(self, link: Link, microbatches: int) -> None:
        super().__init__(link)
        self.microbatches = microbatches

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """See base class."""
        r = np.asarray(replicas, dtype=np.float64)
        share = np.ceil(self.microbatches / r)
        receive_s, send_s = transfer_s(work, self.link)
        ring_s = self._ring_s(work, r)
        end_s = ending_s(work, r, self.microbatches, self.link)
        compute_s = share * self._once_s(work) + (share - 1) * work.accumulate_s + end_s
        return {
            "compute": compute_s,
            "receive": share * receive_s + ring_s,
            "send": share * send_s + ring_s,
        }

    def _once_s(self, work: Work) -> Floats:
        return self._processor_s(work) - work.update_s + work.backward_s

    def _ring_s(self, work: Work, replicas: Floats) -> Floats:
        return 2 * (replicas - 1) / replicas * work.trainable_bytes / self.link.ring_bytes_per_s

    def placed_s(self, placement: Placement) -> list[Busy]:
        """See base class."""
        transfers, _ = placement.transfers()
        loads = transfers.times(self.microbatches)
        busy: list[Busy] = []
        for ranks, work in zip(placement.ranks, placement.works, strict=True):
            r = len(ranks)
            # once per minibatch, not per round of r
            loads.add_ring(ranks, r * float(work.trainable_bytes))
            placed = DoubleBufferedModel(placement.topology.stage_link(ranks), self.microbatches)
            ring_s = float(placed._ring_s(work, np.float64(r)))
            share = np.ceil(self.microbatches / r) * r
            receive_s, send_s = transfers.busiest(ranks)
            own: Busy = {
                "compute": placed.resources_s(work, r)["compute"],
                "receive": np.asarray(share * receive_s + ring_s),
                "send": np.asarray(share * send_s + ring_s),
            }
            busy.append(own)

        placement.add_shared(busy, loads, 1)
        return busy
