"""Make plans of a given shape for the tiny model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import planner
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.plan import save_plan
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem

MODEL = Path(__file__).parent / "model.py"
BATCH_SIZE = 4
MICROBATCHES = 2  # of schedules that divide minibatches


def write_plan(config: str, schedule: str, folder: Path) -> Path:
    """Write the plan with `config`'s replicas per stage into `folder`, unless it is there; return
    its path.
    """
    path = folder / f"plan-{config}-{schedule}.json"
    if not path.exists():
        replicas = [int(part) for part in config.split("-")]
        microbatches = 1 if schedule == "1f1b" else MICROBATCHES
        layer_costs = LayerCosts(
            planner.estimate(MODEL, device="cpu", batch_size=BATCH_SIZE // microbatches)
        )
        layers = len(layer_costs.profile.layers)
        cuts = [layers * stage // len(replicas) for stage in range(1, len(replicas))]
        groups = [list(range(start, end)) for start, end in pairwise([0, *cuts, layers])]
        setting = Setting(flat_cluster(sum(replicas), 1e9), find(schedule), microbatches)
        problem = Problem(layer_costs, setting)
        save_plan(assemble(problem, priced(problem, candidates(groups, replicas))), path)
    return path
