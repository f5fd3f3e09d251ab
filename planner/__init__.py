"""Automatic pipeline-parallel training: profile a model, find the fastest split, train it.

    import planner
    profile = planner.profile("model.py", batch_size=32)
    cluster = planner.cluster(profile, servers=2, gpus_per_server=4, bandwidth="pcie4,10Gbps")
    plan = planner.solve(profile, cluster)
    print(plan)
    planner.train("model.py", plan)

The verbs of the command line, with its defaults; `help(planner.solve)` describes the keywords of
each:

    profile, estimate    cost of each layer, measured on this device or estimated for another
    fit                  from a model's name: does it fit, how to split it, how fast is it
    cluster              GPUs and links, as the command line describes them; also flat_cluster,
                         hierarchical_cluster
    solve                the fastest plan
    price                a plan of stages that you chose yourself
    compare, explain     baselines, what limits a plan
    compare_schedules    the best plan under each of several schedules
    register_schedule    a schedule of a file of your own
    measured_cluster     the cluster as a run found it, to solve again
    simulate, summarize  what workers and links do over time
    show, report         a file as tables; all about a plan as one HTML file
    train, pipeline      train as a plan says, in worker processes or in your own loop
    PipelineTrainer      the Trainer of transformers, whose model is a pipeline
    export, load_weights a plan for others; trained weights for the unsplit model
    quickstart, selftest try all of it on this machine, and check that it works here

Answers are records. `print` shows their tables, a notebook their part of the report; `model_dump()`
gives plain values, as for pandas. `load_` and `save_` functions read and write files.

Names are imported on first use, so that `import planner` costs nothing and solving does not import
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from planner.version import __version__ as __version__

if TYPE_CHECKING:
    from planner.analysis.compare import Comparison as Comparison
    from planner.analysis.compare import compare as compare
    from planner.analysis.explain import Explanation as Explanation
    from planner.analysis.explain import explain as explain
    from planner.api.measured import measured_cluster as measured_cluster
    from planner.api.planning import cluster as cluster
    from planner.api.planning import compare_schedules as compare_schedules
    from planner.api.planning import price as price
    from planner.api.planning import report as report
    from planner.api.planning import show as show
    from planner.api.planning import solve as solve
    from planner.api.running import estimate as estimate
    from planner.api.running import fit as fit
    from planner.api.running import profile as profile
    from planner.api.running import train as train
    from planner.demo.quickstart import QuickstartResult as QuickstartResult
    from planner.demo.quickstart import quickstart as quickstart
    from planner.errors import InfeasibleError as InfeasibleError
    from planner.errors import InputError as InputError
    from planner.errors import PlannerError as PlannerError
    from planner.errors import WorkerError as WorkerError
    from planner.executor.checkpoint.trained_weights import load_weights as load_weights
    from planner.executor.run.pipeline import pipeline as pipeline
    from planner.exports import export as export
    from planner.formats.cluster import Cluster as Cluster
    from planner.formats.cluster import DeviceKind as DeviceKind
    from planner.formats.cluster import Level as Level
    from planner.formats.cluster import flat_cluster as flat_cluster
    from planner.formats.cluster import hierarchical_cluster as hierarchical_cluster
    from planner.formats.cluster import load_cluster as load_cluster
    from planner.formats.cluster import save_cluster as save_cluster
    from planner.formats.device_kinds import profile_of_kinds as profile_of_kinds
    from planner.formats.fit import Fit as Fit
    from planner.formats.own_plan import OwnPlan as OwnPlan
    from planner.formats.own_plan import OwnStage as OwnStage
    from planner.formats.plan import Plan as Plan
    from planner.formats.plan import load_plan as load_plan
    from planner.formats.plan import save_plan as save_plan
    from planner.formats.profile import Profile as Profile
    from planner.formats.profile import load_profile as load_profile
    from planner.formats.profile import save_profile as save_profile
    from planner.formats.timeline import Timeline as Timeline
    from planner.formats.timeline import load_timeline as load_timeline
    from planner.formats.timeline import save_timeline as save_timeline
    from planner.integrations.trainer import PipelineTrainer as PipelineTrainer
    from planner.model.spec import TrainingSpec as TrainingSpec
    from planner.model.spec import in_memory as in_memory
    from planner.model.spec import load_model_file as load_model_file
    from planner.options.solving import Progress as Progress
    from planner.options.solving import SolveOptions as SolveOptions
    from planner.schedule.registry import register_schedule as register_schedule
    from planner.schedule.schedule import Schedule as Schedule
    from planner.selfcheck.run import SelftestReport as SelftestReport
    from planner.selfcheck.run import selftest as selftest
    from planner.simulator.simulate_plan import simulate as simulate
    from planner.simulator.summary import Summary as Summary
    from planner.simulator.summary import summarize as summarize
    from planner.solver.clock import Clock as Clock
    from planner.solver.each_schedule import ScheduleComparison as ScheduleComparison
    from planner.workers.job import TrainResult as TrainResult

# The same names, for those who run and not only read: a test compares the two.
_NAMES = {
    "planner.analysis.compare": ("Comparison", "compare"),
    "planner.analysis.explain": ("Explanation", "explain"),
    "planner.api.measured": ("measured_cluster",),
    "planner.api.planning": ("cluster", "compare_schedules", "price", "report", "show", "solve"),
    "planner.api.running": ("estimate", "fit", "profile", "train"),
    "planner.demo.quickstart": ("QuickstartResult", "quickstart"),
    "planner.errors": ("InfeasibleError", "InputError", "PlannerError", "WorkerError"),
    "planner.executor.checkpoint.trained_weights": ("load_weights",),
    "planner.executor.run.pipeline": ("pipeline",),
    "planner.exports": ("export",),
    "planner.formats.cluster": (
        "Cluster",
        "DeviceKind",
        "Level",
        "flat_cluster",
        "hierarchical_cluster",
        "load_cluster",
        "save_cluster",
    ),
    "planner.formats.device_kinds": ("profile_of_kinds",),
    "planner.formats.fit": ("Fit",),
    "planner.formats.own_plan": ("OwnPlan", "OwnStage"),
    "planner.formats.plan": ("Plan", "load_plan", "save_plan"),
    "planner.formats.profile": ("Profile", "load_profile", "save_profile"),
    "planner.formats.timeline": ("Timeline", "load_timeline", "save_timeline"),
    "planner.integrations.trainer": ("PipelineTrainer",),
    "planner.model.spec": ("TrainingSpec", "in_memory", "load_model_file"),
    "planner.options.solving": ("Progress", "SolveOptions"),
    "planner.schedule.registry": ("register_schedule",),
    "planner.schedule.schedule": ("Schedule",),
    "planner.selfcheck.run": ("SelftestReport", "selftest"),
    "planner.simulator.simulate_plan": ("simulate",),
    "planner.simulator.summary": ("Summary", "summarize"),
    "planner.solver.clock": ("Clock",),
    "planner.solver.each_schedule": ("ScheduleComparison",),
    "planner.workers.job": ("TrainResult",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

# functions, for `help(planner)`; others are types
__all__ = sorted(name for name in _HOMES if name.islower())


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute '{name}'")
    import_module("planner.reporting.shown")  # so that records show their tables
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
