"""Time and memory of PipeDream-2BW: two versions of the weights, gradients accumulated over a minibatch.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1. The pipeline never
drains. Minibatch t, of m microbatches, runs at the version that minibatch t - 2 left,

    w(t+1) = w(t) - lr·∇f(w(t-1)),

so that a stage needs two versions however deep the pipeline is, provided that minibatch t - 2 is done when minibatch t
begins. A replica that takes k = floor(m / r) of the microbatches or more, and has d in flight, has finished all but
d - 1 of those before, hence the rule d - 1 <= k; the paper's m >= d is this without replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.link import Link, backward_and_reduce_s, link_of, ring_all_reduce_s
from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.placement import Busy
from planner.cost.work import Floats, Work

if TYPE_CHECKING:
    from planner.cost.setting import Setting


class DoubleBufferedModel(AsynchronousModel):
    """What each replica's processor and link do per minibatch of m microbatches, n = ceil(m / r) of them the busiest's.

        compute         n·(F + R + Bw) + (n-1)·A + U + max(AR/6, AR - Bw)
        link, each way  n·(activations + gradients) / B + 2(r-1)·W / (r·B) + a·n·messages

    Every microbatch takes its forward and backward, and all but the first add their gradients to those there are, A; Bw
    in the maximum is the last of them, A included. The update and the all-reduce, which begins with the minibatch's
    last backward and is waited for, come once. Divided by m this is (F + Bw) / r + (U + what shows of AR) / m where r
    divides m. With m = r it is the resource model's time of a round. More replicas than microbatches would idle, so
    r <= m.
    """

    def __init__(self, link: Link, microbatches: int) -> None:
        super().__init__(link)
        self.microbatches = microbatches

    @classmethod
    def of(cls, setting: Setting) -> DoubleBufferedModel:
        return cls(link_of(setting.cluster), setting.microbatches)

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        r = np.asarray(replicas, dtype=np.float64)
        share = np.ceil(self.microbatches / r)
        receive_s, send_s = self._link_s(work)
        ring_s = self._ring_s(work, r)
        return {
            "compute": share * self._once_s(work) + (share - 1) * work.accumulate_s + self._end_s(work, r),
            "receive": share * receive_s + ring_s,
            "send": share * send_s + ring_s,
        }

    def _once_s(self, work: Work) -> Floats:
        """The processor's time for one microbatch."""
        return self._processor_s(work) - work.update_s + work.backward_s

    def _end_s(self, work: Work, replicas: Floats) -> Floats:
        """The processor's time once per minibatch: what the last backward leaves of the all-reduce, and the update."""
        reduce_s = ring_all_reduce_s(work.trainable_bytes, replicas, self.link)
        last_s = work.last_backward_s(np.ceil(self.microbatches / replicas))
        return backward_and_reduce_s(last_s, reduce_s, self.link) - last_s + work.update_s

    def _link_s(self, work: Work) -> tuple[Floats, Floats]:
        bandwidth, latency = self.link.bandwidth_bytes_per_s, self.link.latency_s
        return (
            work.received_bytes / bandwidth + work.received_messages * latency,
            work.sent_bytes / bandwidth + work.sent_messages * latency,
        )

    def _ring_s(self, work: Work, replicas: Floats) -> Floats:
        return 2 * (replicas - 1) / replicas * work.trainable_bytes / self.link.ring_bytes_per_s
