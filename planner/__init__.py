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

__version__ = "0.1.0"

if TYPE_CHECKING:
    from planner.answers.compare import compare
    from planner.answers.explain import explain
    from planner.answers.sweep import sweep
    from planner.api import estimate, profile, train
    from planner.cluster import Cluster, flat_cluster
    from planner.errors import InfeasibleError, InputError, PlannerError, WorkerError
    from planner.executor.job import CheckpointOptions, TrainingOptions
    from planner.executor.own_loop import in_memory, pipeline
    from planner.executor.trained_weights import export_weights, load_weights
    from planner.exports import export
    from planner.model.file import load_model_file
    from planner.pipedream import read_profile as load_profile
    from planner.plan_file import Plan, load_plan, save_plan
    from planner.profile_file import Profile, save_profile
    from planner.simulator.plan import simulate
    from planner.solver import solve
    from planner.summary import Summary, summarize
    from planner.timeline import Timeline, load_timeline, save_timeline

_HOMES = {
    "CheckpointOptions": ("planner.executor.job", "CheckpointOptions"),
    "Cluster": ("planner.cluster", "Cluster"),
    "InfeasibleError": ("planner.errors", "InfeasibleError"),
    "InputError": ("planner.errors", "InputError"),
    "Plan": ("planner.plan_file", "Plan"),
    "PlannerError": ("planner.errors", "PlannerError"),
    "Profile": ("planner.profile_file", "Profile"),
    "TrainingOptions": ("planner.executor.job", "TrainingOptions"),
    "Summary": ("planner.summary", "Summary"),
    "Timeline": ("planner.timeline", "Timeline"),
    "WorkerError": ("planner.errors", "WorkerError"),
    "compare": ("planner.answers.compare", "compare"),
    "estimate": ("planner.api", "estimate"),
    "export": ("planner.exports", "export"),
    "explain": ("planner.answers.explain", "explain"),
    "export_weights": ("planner.executor.trained_weights", "export_weights"),
    "flat_cluster": ("planner.cluster", "flat_cluster"),
    "in_memory": ("planner.executor.own_loop", "in_memory"),
    "load_model_file": ("planner.model.file", "load_model_file"),
    "load_plan": ("planner.plan_file", "load_plan"),
    "load_timeline": ("planner.timeline", "load_timeline"),
    "load_profile": ("planner.pipedream", "read_profile"),
    "load_weights": ("planner.executor.trained_weights", "load_weights"),
    "pipeline": ("planner.executor.own_loop", "pipeline"),
    "profile": ("planner.api", "profile"),
    "save_plan": ("planner.plan_file", "save_plan"),
    "save_profile": ("planner.profile_file", "save_profile"),
    "save_timeline": ("planner.timeline", "save_timeline"),
    "simulate": ("planner.simulator.plan", "simulate"),
    "solve": ("planner.solver", "solve"),
    "summarize": ("planner.summary", "summarize"),
    "sweep": ("planner.answers.sweep", "sweep"),
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
