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
    from planner.analysis.compare import compare
    from planner.analysis.explain import explain
    from planner.analysis.sweep import sweep
    from planner.api import estimate, profile, train
    from planner.errors import InfeasibleError, InputError, PlannerError, WorkerError
    from planner.executor.checkpoint.trained_weights import export_weights, load_weights
    from planner.executor.custom_loop import pipeline
    from planner.executor.job import CheckpointOptions, TrainingOptions
    from planner.exports import export
    from planner.formats.cluster import Cluster, flat_cluster
    from planner.formats.importers import read_profile as load_profile
    from planner.formats.plan import Plan, load_plan, save_plan
    from planner.formats.profile import Profile, save_profile
    from planner.formats.timeline import Timeline, load_timeline, save_timeline
    from planner.model.spec import in_memory, load_model_file
    from planner.simulator.plan import simulate
    from planner.simulator.summary import Summary, summarize
    from planner.solver import solve

_HOMES = {
    "CheckpointOptions": ("planner.executor.job", "CheckpointOptions"),
    "Cluster": ("planner.formats.cluster", "Cluster"),
    "InfeasibleError": ("planner.errors", "InfeasibleError"),
    "InputError": ("planner.errors", "InputError"),
    "Plan": ("planner.formats.plan", "Plan"),
    "PlannerError": ("planner.errors", "PlannerError"),
    "Profile": ("planner.formats.profile", "Profile"),
    "TrainingOptions": ("planner.executor.job", "TrainingOptions"),
    "Summary": ("planner.simulator.summary", "Summary"),
    "Timeline": ("planner.formats.timeline", "Timeline"),
    "WorkerError": ("planner.errors", "WorkerError"),
    "compare": ("planner.analysis.compare", "compare"),
    "estimate": ("planner.api", "estimate"),
    "export": ("planner.exports", "export"),
    "explain": ("planner.analysis.explain", "explain"),
    "export_weights": ("planner.executor.checkpoint.trained_weights", "export_weights"),
    "flat_cluster": ("planner.formats.cluster", "flat_cluster"),
    "in_memory": ("planner.model.spec", "in_memory"),
    "load_model_file": ("planner.model.spec", "load_model_file"),
    "load_plan": ("planner.formats.plan", "load_plan"),
    "load_timeline": ("planner.formats.timeline", "load_timeline"),
    "load_profile": ("planner.formats.importers", "read_profile"),
    "load_weights": ("planner.executor.checkpoint.trained_weights", "load_weights"),
    "pipeline": ("planner.executor.custom_loop", "pipeline"),
    "profile": ("planner.api", "profile"),
    "save_plan": ("planner.formats.plan", "save_plan"),
    "save_profile": ("planner.formats.profile", "save_profile"),
    "save_timeline": ("planner.formats.timeline", "save_timeline"),
    "simulate": ("planner.simulator.plan", "simulate"),
    "solve": ("planner.solver", "solve"),
    "summarize": ("planner.simulator.summary", "summarize"),
    "sweep": ("planner.analysis.sweep", "sweep"),
    "train": ("planner.api", "train"),
}

__all__ = [
    "CheckpointOptions",
    "Cluster",
    "InfeasibleError",
    "InputError",
    "Plan",
    "PlannerError",
    "Profile",
    "Summary",
    "Timeline",
    "TrainingOptions",
    "WorkerError",
    "compare",
    "estimate",
    "explain",
    "export",
    "export_weights",
    "flat_cluster",
    "in_memory",
    "load_model_file",
    "load_plan",
    "load_profile",
    "load_timeline",
    "load_weights",
    "pipeline",
    "profile",
    "save_plan",
    "save_profile",
    "save_timeline",
    "simulate",
    "solve",
    "summarize",
    "sweep",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
