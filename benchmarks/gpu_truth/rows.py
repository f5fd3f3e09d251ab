"""A measured row beside its prediction, and what a planner needs to express it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_truth.by_layers import Parts, parts_of
from benchmarks.gpu_truth.gpt import Gpt
from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.setting import Setting
from planner.cost.stage_options import StageOptions, whole_stage
from planner.formats.cluster import Cluster
from planner.formats.profile import Profile
from planner.profiler.estimated.estimate import EstimateOptions
from planner.schedule.flush import FLUSH
from planner.solver.candidates.budget import Budget
from planner.solver.candidates.evaluation import evaluate
from planner.solver.problem import Problem
from planner.solver.result import Evaluation

ANCHORS = Path(__file__).resolve().parents[3] / "shared" / "anchors" / "gpu"
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


@dataclass(frozen=True)
class Stages:
    """A plan: layers and replicas of its stages, and which stages run their forward again."""

    layers: Sequence[int]
    replicas: Sequence[int]
    recompute: bool = False

    def candidates(self) -> list[Candidate]:
        """Return the stages by the positions of their layers."""
        ends = [0, *accumulate(self.layers)]
        return [
            Candidate(
                frozenset(range(first)),
                frozenset(range(first, end)),
                StageOptions(replicas, recompute=whole_stage(range(first, end), self.recompute)),
            )
            for (first, end), replicas in zip(pairwise(ends), self.replicas, strict=True)
        ]


def price(profile: Profile, cluster: Cluster, stages: Stages, microbatches: int) -> Evaluation:
    """Price and simulate a plan under 1F1B that drains after every minibatch."""
    setting = Setting(cluster, FLUSH, microbatches)
    problem = Problem(LayerCosts(profile), setting, depth="published", budget=Budget.unlimited())
    return evaluate(problem, stages.candidates())


def parts(gpt: Gpt, microbatch_size: int, options: EstimateOptions) -> Parts:
    """Estimate once for all rows of a model."""
    key = f"{gpt} {microbatch_size} {options}"
    if key not in _ESTIMATED:
        _ESTIMATED[key] = parts_of(gpt, microbatch_size, options)
    return _ESTIMATED[key]


def anchors(name: str) -> Any:
    """Read one of the JSON files."""
    return json.loads((ANCHORS / name).read_text(encoding="utf-8"))
