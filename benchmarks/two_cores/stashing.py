"""Measure the memory of weight stashing: a run with a version per minibatch in flight, and one with
one version.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.malloc import pages_returned
from benchmarks.two_cores.launch import places, run_workers
from benchmarks.two_cores.ours import STASHED, UNSTASHED, Ours
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile, load_profile
from planner.solver.assemble import assemble
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import uncut_groups

IN_FLIGHT = 8
STEPS = 3 * IN_FLIGHT
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class StashMemory:
    """Peak memory of a first stage that holds nearly all of a model, in bytes."""

    model: str
    weight_bytes: int  # of the stage
    versions: int
    stashed_bytes: int
    unstashed_bytes: int

    @property
    def measured_bytes(self) -> int:
        """Memory of all versions but the newest."""
        return self.stashed_bytes - self.unstashed_bytes

    @property
    def formula_bytes(self) -> int:
        """(d - 1) W: one version for each of the d minibatches in flight, without the newest."""
        return (self.versions - 1) * self.weight_bytes


def stash_memory(model: str, batch_size: int, folder: Path) -> StashMemory:
    """Measure both runs of `model`."""
    with places("loopback") as where:
        ours = Ours(model, "loopback", batch_size, where, folder)
        # Before pages are given back, which takes up to half of the time: predictions of speed use
        # this profile, too.
        profile = load_profile(ours.profile(1))
        path = folder / f"{model}-deep.plan.json"
        save_plan(deep_plan(profile), path)
        arguments = ["train", str(ours.spec), "--plan", str(path), "--steps", str(STEPS), "--json"]
        first = []
        with pages_returned():
            for module in (STASHED, UNSTASHED):
                result = run_workers(where, module, arguments, TIMEOUT_S)
                first.append(next(report for report in result["reports"] if report["stage"] == 0))
    return _compared(model, profile, load_plan(path), first)


def deep_plan(profile: Profile) -> Plan:
    """Return a plan with all but a few layers in the first stage, and enough minibatches in flight
    to show versions.
    """
    layer_costs = LayerCosts(profile)
    groups = uncut_groups(layer_costs)
    total = sum(layer.weight_bytes for layer in profile.layers)

    def weights_after(cut: int) -> int:
        return sum(profile.layers[layer].weight_bytes for group in groups[cut:] for layer in group)

    cut = next(cut for cut in range(1, len(groups)) if weights_after(cut) < 0.2 * total)
    stages = candidates(
        [[i for group in part for i in group] for part in (groups[:cut], groups[cut:])], (1, 1)
    )
    problem = Problem(layer_costs, Setting(flat_cluster(2, 1e9)))
    plan = assemble(problem, priced(problem, stages))
    first, last = plan.stages
    return plan.model_copy(
        update={"stages": (first.model_copy(update={"in_flight": IN_FLIGHT}), last)}
    )


def _compared(model: str, profile: Profile, plan: Plan, first: list[dict[str, Any]]) -> StashMemory:
    weight_bytes = sum(
        layer.weight_bytes for layer in profile.layers if layer.name in plan.stages[0].layers
    )
    stashed, unstashed = first
    return StashMemory(
        model,
        weight_bytes,
        versions=stashed["weight_versions"],
        stashed_bytes=stashed["peak_memory_bytes"],
        unstashed_bytes=unstashed["peak_memory_bytes"],
    )
