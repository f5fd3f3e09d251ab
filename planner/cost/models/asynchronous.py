"""The time of an asynchronous pipeline (1f1b): every replica's processor and links in the steady state.

Legend:  F forward, Bw backward, U update, R recomputation seconds;  W trainable bytes;  r replicas;  B bytes/s;
a latency in s;  A seconds of accumulating gradients, which depend on W alone, not on how large a microbatch is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.models.cost_model import StageModel, finish_s, reduce_s, transfer_s
from planner.cost.network.link import backward_and_reduce_s
from planner.cost.network.placement import Busy, Placement
from planner.cost.work import Floats, Work


class AsynchronousModel(StageModel):
    """Busy time of each replica's processor and link, per minibatch. The default, because it matches measurements.

        compute        (F + R + U + max(Bw + AR/n, AR)) / r
        link, each way (activations + gradients) / (r·B) + 2(r-1)·W / (r²·B) + a·messages / r

    All but the last of the n buckets of AR, the ring all-reduce, can overlap with the replica's own backward. Where the
    processors themselves move the messages nothing overlaps, and the processor's time is
    (F + R + U + Bw + AR + bytes received and sent / 2B) / r.

    A stage whose optimizer is sharded has half of AR there, the reduce-scatter, and U/r + AR/2 in the place of U: its
    part of the update, and the all-gather (`planner.cost.models.cost_model`).

    A value that several later stages use travels along them, so each crosses every link at most once.
    """

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        r = np.asarray(replicas, dtype=np.float64)
        receive_s, send_s = transfer_s(work, self.link)
        ring_s = 2 * (r - 1) / (r * r) * work.trainable_bytes / self.link.ring_bytes_per_s
        return {
            "compute": (
                self._processor_s(work, r)
                + backward_and_reduce_s(work.backward_s, reduce_s(work, r, self.link), self.link)
            )
            / r,
            "receive": receive_s / r + ring_s,
            "send": send_s / r + ring_s,
        }

    def _processor_s(self, work: Work, replicas: ArrayLike = 1.0) -> Floats:
        """Compute the processor's seconds that cannot overlap with the backward's all-reduce or reduce-scatter."""
        handling_s = self.link.handling_s(work.received_bytes + work.sent_bytes)
        return work.forward_s + work.recompute_s + finish_s(work, replicas, self.link) + handling_s

    def placed_s(self, placement: Placement) -> list[Busy]:
        loads, _ = placement.transfers()
        for ranks, work in zip(placement.ranks, placement.works, strict=True):
            loads.add_ring(ranks, float(work.trainable_bytes))
        busy: list[Busy] = []
        for ranks, work in zip(placement.ranks, placement.works, strict=True):
            placed = AsynchronousModel(placement.topology.stage_link(ranks))
            receive_s, send_s = loads.busiest(ranks)
            compute_s = placed.resources_s(work, len(ranks))["compute"]
            busy.append({"compute": compute_s, "receive": np.asarray(receive_s), "send": np.asarray(send_s)})
        placement.add_shared(busy, loads, 1)
        return busy
