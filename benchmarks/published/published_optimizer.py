"""Solve a chain on one level of GPUs by the dynamic programme of PipeDream's published optimizer.

Narayanan et al., SOSP 2019, section 3.1, in the form of the published code
(optimizer_graph_hierarchical.py). The best time of the first j layers on m GPUs is a minimum over
all last stages from k to j on m' of the GPUs. Each candidate takes the maximum of the time of what
precedes the stage, its own time, and the time of the boundary. It takes O(L²·G²) steps in pure
Python, as published. Only what the last level needs is computed, which favours the published
optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChainLayer:
    """The published optimizer's inputs for a layer."""

    compute_s: float
    activation_bytes: float
    parameter_bytes: float


def best_time_s(layers: Sequence[ChainLayer], gpus: int, bandwidth_bytes_per_s: float) -> float:
    """Return the seconds per minibatch of the best pipeline."""
    count = len(layers)
    compute, weights = [0.0], [0.0]
    for layer in layers:
        compute.append(compute[-1] + layer.compute_s)
        weights.append(weights[-1] + layer.parameter_bytes)

    def stage_s(first: int, end: int, replicas: int) -> float:
        all_reduce_s = (
            4
            * (replicas - 1)
            * (weights[end] - weights[first])
            / (bandwidth_bytes_per_s * replicas)
        )
        return (compute[end] - compute[first] + all_reduce_s) / replicas

    best = [
        [stage_s(0, end, gpus_) if end and gpus_ else 0.0 for gpus_ in range(gpus + 1)]
        for end in range(count + 1)
    ]
    for gpus_ in range(2, gpus + 1):
        for end in range(2, count + 1):
            least_s = min(best[end][gpus_], best[end][gpus_ - 1])
            out_bytes = layers[end - 1].activation_bytes if end < count else 0.0
            for cut in range(1, end):
                before, transfer_s = (
                    best[cut],
                    2 * layers[cut - 1].activation_bytes / bandwidth_bytes_per_s,
                )
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
