"""Time and memory of the interleaved schedule: K workers with v chunks of the model each, m microbatches.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2, whose
chunks are equal: time (m·v + K - 1)·t for chunks of t = F + Bw, bubble (K - 1) / (m·v). For unequal chunks, worker p
cannot begin before the first microbatch has passed the first p stages, must do the work of all its chunks for every
microbatch, and what it returns last must pass those stages again:

    T >= sum over stages i < p of latency_i  +  m·(sum over its chunks of busy)  +  end_p          for every worker p

and (m - 1) times what adding up the gradients of its chunks takes. latency_i, busy and end_p as in `SynchronousModel`.
The largest of these is the price; with equal chunks it is the published time, otherwise a bound that the simulated
streams exceed by what workers wait for each other. Every stage has the same number of replicas r, each pipeline taking
ceil(m / r) of the microbatches; all r of a stage reduce together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.cost.asynchronous import Link, backward_and_reduce_s, ring_all_reduce_s
from planner.cost.synchronous import SynchronousModel
from planner.cost.work import Floats, Work
from planner.schedule.interleaved import chunks_in_flight


@dataclass(frozen=True)
class StageSeconds:
    """Of candidate stages, for one microbatch; the all-reduce and the update once."""

    latency_s: Floats  # forward to backward, with its half of the transfers at both ends
    compute_s: Floats
    receive_s: Floats
    send_s: Floats
    backward_s: Floats
    reduce_s: Floats
    update_s: Floats
    accumulate_s: Floats  # for each microbatch but the first

    @classmethod
    def of(cls, work: Work, replicas: int, link: Link) -> StageSeconds:
        """Seconds of stages on `replicas` workers each."""
        bandwidth, latency = link.bandwidth_bytes_per_s, link.latency_s
        handling_s = link.handling_s(work.received_bytes + work.sent_bytes)
        return cls(
            latency_s=SynchronousModel(link, "gpipe", 1).sum_s(work),
            compute_s=work.forward_s + work.recompute_s + work.backward_s + handling_s,
            receive_s=work.received_bytes / bandwidth + work.received_messages * latency,
            send_s=work.sent_bytes / bandwidth + work.sent_messages * latency,
            backward_s=work.backward_s,
            reduce_s=ring_all_reduce_s(work.trainable_bytes, replicas, link),
            update_s=work.update_s,
            accumulate_s=work.accumulate_s,
        )


WorkerResource = Literal["compute", "receive", "send"]


@dataclass(frozen=True)
class InterleavedModel:
    """Prices pipelines of `workers` times `chunks` stages, in `replicas` copies.

    Args:
        link: of every device.
        workers: K.
        chunks: v.
        replicas: r.
        microbatches: m.
    """

    link: Link
    workers: int
    chunks: int
    replicas: int
    microbatches: int

    @property
    def units(self) -> int:
        """Microbatches of the busiest copy."""
        return -(-self.microbatches // self.replicas)

    def worker_s(self, stages: StageSeconds) -> dict[WorkerResource, Floats]:
        """Seconds per minibatch that each worker's resources ask for.

        Args:
            stages: the last axis is the K·v stages; others are alternatives.

        Returns:
            By resource; the last axis is the K workers.
        """
        latency_s = self._by_worker(stages.latency_s)[..., 0, :]
        fill_s = np.cumsum(latency_s, axis=-1) - latency_s
        end_s = fill_s + self._end_s(stages)
        return {
            "compute": self.units * self._total(stages.compute_s)
            + (self.units - 1) * self._total(stages.accumulate_s)
            + end_s,
            "receive": self.units * self._total(stages.receive_s) + end_s,
            "send": self.units * self._total(stages.send_s) + end_s,
        }

    def seconds(self, stages: StageSeconds) -> Floats:
        """Seconds per minibatch; the last axis of `stages` is the K·v stages."""
        return np.asarray(np.max(np.stack(list(self.worker_s(stages).values())), axis=(0, -1)))

    def in_flight(self) -> tuple[int, ...]:
        """Microbatches that one replica of each stage holds at once, for all K·v stages."""
        shares = {self.units, self.microbatches // self.replicas} - {0}
        per_worker = [
            [chunks_in_flight(self.workers, self.chunks, position, share) for share in shares]
            for position in range(self.workers)
        ]
        return tuple(
            max(counts[chunk] for counts in per_worker[position])
            for chunk in range(self.chunks)
            for position in range(self.workers)
        )

    def _end_s(self, stages: StageSeconds) -> Floats:
        """What the last backwards of a worker's chunks leave of their all-reduces, and their updates."""
        last_s = stages.backward_s + (stages.accumulate_s if self.units > 1 else 0.0)
        backward_s, reduce_s = self._total(last_s), self._total(stages.reduce_s)
        exposed_s = backward_and_reduce_s(backward_s, reduce_s, self.link) - backward_s
        return np.asarray(exposed_s + self._total(stages.update_s))

    def _by_worker(self, stages: Floats) -> Floats:
        return np.asarray(stages).reshape(*np.shape(stages)[:-1], self.chunks, self.workers)

    def _total(self, stages: Floats) -> Floats:
        return np.asarray(self._by_worker(stages).sum(axis=-2))


def worker_bytes(stage_bytes: Floats, workers: int) -> Floats:
    """What each of a pipeline's K workers holds; the last axis of `stage_bytes` is the K·v stages."""
    return np.asarray(stage_bytes.reshape(*stage_bytes.shape[:-1], -1, workers).sum(axis=-2))
