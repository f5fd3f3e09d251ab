"""Automatic pipeline-parallel training: profile a model, find the fastest split, train it.

The verbs of the command line as functions:

    import planner
    profile = planner.profile(planner.load_model_file("model.py"), batch_size=32)
    plan = planner.solve(profile, planner.flat_cluster(gpus=8, bandwidth_bytes_per_s=1.25e9))
    planner.save_plan(plan, "plan.json")

Names are imported on first use, so that `import planner` costs nothing and solving does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from planner.version import __version__ as __version__

if TYPE_CHECKING:
    from planner.analysis.compare import compare as compare
    from planner.analysis.explain import explain as explain
    from planner.analysis.own_plan import price as price
    from planner.analysis.sweep import sweep as sweep
    from planner.api import estimate as estimate
    from planner.api import profile as profile
    from planner.api import train as train
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import InputError as InputError
    from planner.errors import PlannerError as PlannerError
    from planner.errors import WorkerError as WorkerError
    from planner.executor.checkpoint.trained_weights import export_weights as export_weights
    from planner.executor.checkpoint.trained_weights import load_weights as load_weights
    from planner.executor.run.pipeline import pipeline as pipeline
    from planner.exports import export as export
    from planner.formats.cluster import Cluster as Cluster
    from planner.formats.cluster import flat_cluster as flat_cluster
    from planner.formats.device_kinds import profile_of_kinds as profile_of_kinds
    from planner.formats.importers import read_profile
    from planner.formats.own_plan import OwnPlan as OwnPlan
    from planner.formats.own_plan import OwnStage as OwnStage
    from planner.formats.plan import Plan as Plan
    from planner.formats.plan import load_plan as load_plan
    from planner.formats.plan import save_plan as save_plan
    from planner.formats.profile import Profile as Profile
    from planner.formats.profile import save_profile as save_profile
    from planner.formats.timeline import Timeline as Timeline
    from planner.formats.timeline import load_timeline as load_timeline
    from planner.formats.timeline import save_timeline as save_timeline
    from planner.model.spec import in_memory as in_memory
    from planner.model.spec import load_model_file as load_model_file
    from planner.options.training import CheckpointOptions as CheckpointOptions
    from planner.options.training import TrainingOptions as TrainingOptions
    from planner.simulator.simulate_plan import simulate as simulate
    from planner.simulator.summary import Summary as Summary
    from planner.simulator.summary import summarize as summarize
    from planner.solver import solve as solve

    load_profile = read_profile

# The modules that the names of the public API come from.
_NAMES = {
    "planner.analysis.compare": "compare",
    "planner.analysis.explain": "explain",
    "planner.analysis.own_plan": "price",
    "planner.analysis.sweep": "sweep",
    "planner.api": "estimate profile train",
    "planner.errors": "InfeasibleError InputError PlannerError WorkerError",
    "planner.executor.checkpoint.trained_weights": "export_weights load_weights",
    "planner.executor.run.pipeline": "pipeline",
    "planner.options.training": "CheckpointOptions TrainingOptions",
    "planner.exports": "export",
    "planner.formats.cluster": "Cluster flat_cluster",
    "planner.formats.device_kinds": "profile_of_kinds",
    "planner.formats.importers": "load_profile",
    "planner.formats.own_plan": "OwnPlan OwnStage",
    "planner.formats.plan": "Plan load_plan save_plan",
    "planner.formats.profile": "Profile save_profile",
    "planner.formats.timeline": "Timeline load_timeline save_timeline",
    "planner.model.spec": "in_memory load_model_file",
    "planner.simulator.simulate_plan": "simulate",
    "planner.simulator.summary": "Summary summarize",
    "planner.solver": "solve",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_OTHER_NAMES = {"load_profile": "read_profile"}  # in their modules

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), _OTHER_NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
