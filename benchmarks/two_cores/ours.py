"""Our schedules, through the public command line only: plan profile, plan solve, plan train."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.two_cores.launch import CORES, ROOT, Place, RunError, last_object, run_workers
from planner.plan_file import Plan, load_plan

LOOPBACK = "10Gbps"  # what a plan for the loopback assumes; neither model is near it
WARM_UP_STEPS = 20


@dataclass
class Ours:
    """One model on one network: profiled once per microbatch size, on one idle core, then solved and trained."""

    model: str
    network: str
    batch_size: int
    where: Sequence[Place]
    seconds: float
    folder: Path
    timeout_s: float
    _paths: dict[tuple[str, int], Path] = field(default_factory=dict)

    @property
    def model_file(self) -> Path:
        """The same file whose functions the baselines call."""
        return ROOT / "benchmarks" / "two_cores" / f"{self.model}.py"

    def plan(self, schedule: str, microbatches: int) -> Path:
        """Solve for two devices; returns the plan's path."""
        microbatch_size = self.batch_size // microbatches
        profile = self.folder / f"{self.model}-{microbatch_size}.profile.json"
        if not profile.exists():
            _plan("profile", str(self.model_file), "--batch-size", str(microbatch_size), "-o", str(profile))
        plan = self.folder / f"{self.model}-{self.network}-{schedule}-{microbatches}.plan.json"
        bandwidth = LOOPBACK if self.network == "loopback" else self.network.replace("bit", "bps").replace("g", "G")
        command = ["solve", "--gpus", str(len(CORES)), "--bandwidth", bandwidth, "--profile", str(profile)]
        _plan(*command, "--schedule", schedule, "--microbatches", str(microbatches), "-o", str(plan))
        return plan

    def train(self, plan: Path) -> dict[str, Any]:
        """Train for about `seconds` after the start-up; the result of `plan train --json`."""
        predicted_s = load_plan(plan).predicted.seconds_per_minibatch
        steps = WARM_UP_STEPS + math.ceil(self.seconds / predicted_s)
        arguments = ["train", str(self.model_file), "--plan", str(plan), "--steps", str(steps), "--json"]
        return run_workers(self.where, "planner", arguments, self.timeout_s)


def cut_of(path: Path) -> int:
    """Children of the model's sequence in the plan's first stage: where the baselines are cut."""
    return _cut(load_plan(path))


def _cut(plan: Plan) -> int:
    if len(plan.stages) != len(CORES):
        raise RunError(f"the plan '{plan.config}' has no single cut that the baselines could be given")
    return int(plan.stages[1].layers[0].split(".")[0])


def _plan(*arguments: str) -> dict[str, Any]:
    command = ["taskset", "-c", str(CORES[0]), sys.executable, "-m", "planner", *arguments, "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise RunError(f"plan {' '.join(arguments)} failed with exit code {done.returncode}:\n{done.stderr}")
    return last_object(done.stdout) if done.stdout.strip() else json.loads("{}")
