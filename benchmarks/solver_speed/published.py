"""The dynamic programme of PipeDream's published optimizer, written plainly, for a chain and one level of GPUs.

Narayanan et al., SOSP 2019, section 3.1, in the form of the published code (optimizer_graph_hierarchical.py): the best
time of the first j layers on m GPUs is the least, over every last stage from k to j on some m' of them, of the larger
of the time before it, its own time, and the time of the boundaries. O(L²·G²) steps in pure Python, as published. It
only computes what its last level needs (plans from the first layer on), which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChainLayer:
    """What the published optimizer reads of a layer."""

    compute_s: float
    activation_bytes: float
    parameter_bytes: float


def best_time_s(layers: Sequence[ChainLayer], gpus: int, bandwidth_bytes_per_s: float) -> float:
    """Seconds per minibatch of the best pipeline."""
    count = len(layers)
    compute, weights = [0.0], [0.0]
    for layer in layers:
        compute.append(compute[-1] + layer.compute_s)
        weights.append(weights[-1] + layer.parameter_bytes)

    def stage_s(first: int, end: int, replicas: int) -> float:
        all_reduce_s = 4 * (replicas - 1) * (weights[end] - weights[first]) / (bandwidth_bytes_per_s * replicas)
        return (compute[end] - compute[first] + all_reduce_s) / replicas

    best = [[stage_s(0, end, gpus_) if end and gpus_ else 0.0 for gpus_ in range(gpus + 1)] for end in range(count + 1)]
    for gpus_ in range(2, gpus + 1):
        for end in range(2, count + 1):
            least_s = min(best[end][gpus_], best[end][gpus_ - 1])
            out_bytes = layers[end - 1].activation_bytes if end < count else 0.0
            for cut in range(1, end):
                before, transfer_s = best[cut], 2 * layers[cut - 1].activation_bytes / bandwidth_bytes_per_s
                leaving_s = 2 * out_bytes / bandwidth_bytes_per_s
                for replicas in range(1, gpus_):
                    seconds = max(
                        before[gpus_ - replicas],
                        stage_s(cut, end, replicas),
                        transfer_s / replicas,
                        leaving_s / replicas,
                    )
                    if seconds < least_s:
                        least_s = seconds
            best[end][gpus_] = least_s
    return best[count][gpus]
