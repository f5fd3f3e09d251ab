"""Make plans of a given shape for the tiny model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import planner
from planner.cost.layer_costs import LayerCosts, candidates
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.plan import SolverReport, save_plan
from planner.schedule.registry import find
from planner.solver.assemble import assemble

MODEL = Path(__file__).parent / "model.py"
BATCH_SIZE = 4
MICROBATCHES = 2  # of schedules that divide minibatches


def write_plan(config: str, schedule: str, folder: Path) -> Path:
    """Write the plan with `config`'s replicas per stage into `folder`, unless it is there; return its path."""
    path = folder / f"plan-{config}-{schedule}.json"
    if not path.exists():
        replicas = [int(part) for part in config.split("-")]
        microbatches = 1 if schedule == "1f1b" else MICROBATCHES
        layer_costs = LayerCosts(planner.estimate(MODEL, device="cpu", batch_size=BATCH_SIZE // microbatches))
        layers = len(layer_costs.profile.layers)
        cuts = [layers * stage // len(replicas) for stage in range(1, len(replicas))]
        groups = [list(range(start, end)) for start, end in pairwise([0, *cuts, layers])]
        cluster = flat_cluster(sum(replicas), 1e9)
        stages = candidates(groups, replicas)
        how = find(schedule)
        cost = price(layer_costs, stages, Setting(cluster, how, microbatches))
        report = SolverReport(
            name="given", cost_model="resource", status="feasible", lower_bound_s=0.0, gap=1.0, seconds=0.0
        )
        save_plan(assemble(layer_costs, cluster, stages, cost, how, microbatches, report), path)
    return path
