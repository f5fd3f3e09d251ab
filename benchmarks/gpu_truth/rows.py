"""A measured row beside its prediction, and what a planner needs to express it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_truth.fused_kernels import megatron
from planner.analysis import given_plan
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DEVICES, HOSTS, DeviceSpec
from planner.profiler.estimated.execution import Execution
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH
from planner.simulator.simulate_plan import simulated_s

ANCHORS = Path(__file__).resolve().parents[3] / "shared" / "anchors" / "gpu"
_PER_SERVER = 8
_NVLINK = 300e9  # bytes per second; data sheet of the A100: 600 GB/s both ways
PCIE = 4e9  # bytes per second; README of the anchors: 3 to 5 GB/s
_MIB = 2**20


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a run: seconds per iteration, and predicted and measured bytes of
    stages' peaks.
    """

    seconds: float
    memory: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        source: the set that it belongs to.
        job: what was to be done, with how many GPUs; rows of one job differ in the plan, so that
            one can choose.
        plan: how it was done.
        measured_s: seconds per iteration, or of a part of it.
        predict: the run on a device; None where the planner cannot express the row.
        needs: what it lacks for that.
        spec: the device, by its data sheet; None where nothing is estimated.
        predicted: on that device.
        calibrated_s: seconds after calibration on other rows of the same source and device.
        by_job_s: the same on those of other jobs alone.
    """

    source: str
    job: str
    plan: str
    measured_s: float
    predict: Callable[[DeviceSpec], Prediction] | None = None
    needs: tuple[str, ...] = ()
    spec: DeviceSpec | None = None
    predicted: Prediction | None = None
    calibrated_s: float | None = None
    by_job_s: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted is None else self.predicted.seconds / self.measured_s - 1

    @property
    def memory(self) -> tuple[tuple[float, float], ...]:
        """Predicted and measured bytes of stages' peaks."""
        return () if self.predicted is None else self.predicted.memory

    def now(self) -> Row:
        """Return the row with its prediction."""
        if self.predict is None or self.spec is None:
            return self
        return replace(self, predicted=self.predict(self.spec))


def price(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[OwnStage],
    microbatches: int,
    chunks: int | None = None,
) -> Plan:
    """Price and simulate a plan as `plan price` does, under 1F1B that drains after every minibatch.

    With `chunks`, each rank has so many stages, which it interleaves.
    """
    plain = OwnPlan(stages=tuple(stages), schedule=FLUSH, microbatches=microbatches)
    interleaved = {"schedule": INTERLEAVED, "chunks": chunks}
    return given_plan.price(
        profile, cluster, plain if chunks is None else plain.model_copy(update=interleaved)
    )


def without_overlap(plan: Plan) -> float:
    """Return the plan's seconds where gradients are all-reduced after the last backward, as
    Megatron did until 2023.
    """
    stages = (
        stage.model_copy(update={"ready_s": (stage.backward_s + stage.late_s,), "ready_shares": ()})
        for stage in plan.stages
    )
    return simulated_s(plan.model_copy(update={"stages": tuple(stages)}))


def servers(gpus: int, between_bytes_per_s: float) -> Cluster:
    """Return servers of eight A100, joined by links of so many bytes per second each."""
    return hierarchical_cluster((_PER_SERVER, gpus // _PER_SERVER), (_NVLINK, between_bytes_per_s))


def reducing(cluster: Cluster, ranks: int, size_bytes: float) -> Cluster:
    """Return a cluster of A100 whose groups of ranks all-reduce as was measured for so many, and
    about this size.
    """
    sizes, rates = zip(*_all_reduces()[min(ranks, _PER_SERVER)], strict=True)
    rate = float(np.interp(np.log(size_bytes), np.log(sizes), rates))
    inner, *outer = cluster.levels
    inner = inner.model_copy(update={"all_reduce_bandwidth_bytes_per_s": rate})
    return cluster.model_copy(update={"levels": (inner, *outer)})


@cache
def _all_reduces() -> dict[int, list[tuple[float, float]]]:
    """Measured all-reduces on one server: by GPUs, bytes and the bandwidth of each GPU's link."""
    found: dict[int, list[tuple[float, float]]] = {}
    with (ANCHORS / "vtrain-a100-allreduce.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            row = float(record["bytes"]), float(record["bus_GB_per_s"]) * 1e9
            found.setdefault(int(record["gpus"]), []).append(row)
    return found


def memory_of(
    plan: Plan, peaks_mb: Sequence[float | None] | None
) -> tuple[tuple[float, float], ...]:
    """Pair the bytes of stages' tensors with the allocator's peak, where it was logged, in MiB."""
    pairs = zip(plan.stages, peaks_mb or (), strict=False)
    return tuple(
        (stage.memory.tensor_bytes, theirs * _MIB) for stage, theirs in pairs if theirs is not None
    )


def device(name: str, clock: float = 1.0) -> DeviceSpec:
    """Return a device at a share of its boost clock, whose kernels are launched as Megatron's fused
    ones.
    """
    return replace(DEVICES[name].at_clock(clock), dispatch_s=HOSTS["fused"])


def half_precision() -> Execution:
    """Return how GPUs run in half precision with master weights and Megatron's fused kernels."""
    return Execution("cuda", megatron, master_weights=True, sums_in_half=True)


def unfused() -> Execution:
    """Return how GPUs run in half precision with master weights and PyTorch's own kernels, with
    gradients that are summed and all-reduced in single precision.
    """
    return Execution("cuda", None, master_weights=True)


def anchors(name: str) -> Any:
    """Read one of the JSON files."""
    return json.loads((ANCHORS / name).read_text(encoding="utf-8"))
