"""A measured row beside its prediction, and what a planner needs to express it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_truth.by_layers import Parts, parts_of
from benchmarks.gpu_truth.gpt import Gpt
from planner.analysis import own_plan
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DEVICES
from planner.profiler.estimated.estimate import EstimateOptions
from planner.profiler.estimated.execution import Fusion
from planner.schedule.flush import FLUSH

ANCHORS = Path(__file__).resolve().parents[3] / "shared" / "anchors" / "gpu"
PCIE = 4e9  # bytes per second; README of the anchors: 3 to 5 GB/s
_CLOCKS = {"l4": 1050 / 2040}  # MHz: README of the anchors, and the data sheet's boost
_MIB = 2**20
_ESTIMATED: dict[str, Parts] = {}


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        source: the set that it belongs to.
        job: what was to be done, with how many GPUs; rows of one job differ in the plan, so that one can choose.
        plan: how it was done.
        measured_s: seconds per iteration, or of a part of it.
        predicted_s: None where the planner cannot express the row.
        needs: what it lacks for that.
        memory: predicted and measured bytes of stages' peaks.
    """

    source: str
    job: str
    plan: str
    measured_s: float
    predicted_s: float | None = None
    needs: tuple[str, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1


def price(profile: Profile, cluster: Cluster, stages: Sequence[OwnStage], microbatches: int) -> Plan:
    """Price and simulate a plan as `plan price` does, under 1F1B that drains after every minibatch."""
    return own_plan.price(profile, cluster, OwnPlan(stages=tuple(stages), schedule=FLUSH, microbatches=microbatches))


def memory_of(plan: Plan, peaks_mb: Sequence[float | None] | None) -> tuple[tuple[float, float], ...]:
    """Pair the bytes of stages' tensors with the allocator's peak, where it was logged, in MiB."""
    pairs = zip(plan.stages, peaks_mb or (), strict=False)
    return tuple((stage.memory.tensor_bytes, theirs * _MIB) for stage, theirs in pairs if theirs is not None)


def half_precision(device: str, fusion: Fusion | None = None) -> EstimateOptions:
    """Return what to estimate for a run in half precision with master weights."""
    spec = DEVICES[device].at_clock(_CLOCKS.get(device, 1.0))
    return EstimateOptions(spec, "float16", fusion=fusion, master_weights=True)


def parts(gpt: Gpt, microbatch_size: int, options: EstimateOptions) -> Parts:
    """Estimate once for all rows of a model."""
    key = f"{gpt} {microbatch_size} {options}"
    if key not in _ESTIMATED:
        _ESTIMATED[key] = parts_of(gpt, microbatch_size, options)
    return _ESTIMATED[key]


def anchors(name: str) -> Any:
    """Read one of the JSON files."""
    return json.loads((ANCHORS / name).read_text(encoding="utf-8"))
