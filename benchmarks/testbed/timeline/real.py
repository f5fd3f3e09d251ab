"""Run two workers with real computation, each on its own core, over this machine's loopback."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import ROOT
from benchmarks.testbed.two_cores.launch import CORES, Loopback, RunError, run_workers
from benchmarks.testbed.two_cores.straight import straight_plan
from planner.formats.cluster import Cluster, load_cluster
from planner.formats.plan import Plan, save_plan
from planner.formats.profile import Profile, load_profile
from planner.formats.timeline import Timeline
from planner.reporting.trace import load_run

TIMEOUT_S = 110.0
PROFILE_SECONDS = 5.0
PLACES = (Loopback(), Loopback())


@dataclass(frozen=True)
class Case:
    """A run of a model under profiles/ in two stages."""

    model: str
    microbatch_size: int
    schedule: str
    microbatches: int = 1

    @property
    def name(self) -> str:
        """Name in the table and on the command line."""
        return f"{self.model} {self.schedule}" + (
            f" x{self.microbatches}" if self.microbatches > 1 else ""
        )


def measure_links(folder: Path) -> Cluster:
    """Measure the links between the two workers with `plan profile --links`."""
    path = folder / "cluster.json"
    run_workers(
        PLACES,
        "planner",
        ["profile", "--links", "--device", "cpu", "--json", "-o", str(path)],
        TIMEOUT_S,
    )
    return load_cluster(path)


def run_case(case: Case, cluster: Cluster, seconds: float, folder: Path) -> tuple[Plan, Timeline]:
    """Profile, plan, and train for about `seconds`, recording every minibatch."""
    profile = _profile(case, folder)
    plan = straight_plan(profile, cluster, case.schedule, case.microbatches)
    plan_path, trace = folder / f"{case.name}.plan.json", folder / f"{case.name}.trace.json"
    save_plan(plan, plan_path)
    steps = max(16, math.ceil(seconds / plan.predicted.seconds_per_minibatch))
    arguments = [
        "train",
        str(_model(case)),
        "--plan",
        str(plan_path),
        "--steps",
        str(steps),
        "--json",
    ]
    arguments += ["--trace", str(trace), "--trace-minibatches", str(steps)]
    run_workers(PLACES, "planner", arguments, TIMEOUT_S)
    return plan, load_run(trace)


def _model(case: Case) -> Path:
    return ROOT / "profiles" / case.model / "model.py"


def _profile(case: Case, folder: Path) -> Profile:
    """Profile while another worker trains on the other core, as in the run.

    Each run has its own profile, because the speed of a shared machine drifts by several per cent
    within minutes.
    """
    path = folder / f"{case.name}.profile.json"
    command = [sys.executable, "-m", "planner", "profile", str(_model(case)), "--device", "cpu"]
    command += ["--processes", str(len(CORES))]
    command += [
        "--batch-size",
        str(case.microbatch_size),
        "--seconds",
        str(PROFILE_SECONDS),
        "-o",
        str(path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"'{case.model}' was not profiled within {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise RunError(f"'{case.model}' could not be profiled:\n{done.stderr}")
    return load_profile(path)
