"""Run our schedules through the public command line: plan profile, plan solve, plan train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import ROOT
from benchmarks.testbed.two_cores.launch import CORES, Place, RunError, last_object
from benchmarks.testbed.two_cores.straight import straight_plan
from benchmarks.testbed.two_cores.turns import Contender
from planner.formats.cluster import flat_cluster, load_cluster, save_cluster
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile, load_profile
from planner.profiler.links.measure_cluster import measure_host
from planner.units import parse_bandwidth

FOR_EVER = 10**6  # minibatches, and seconds


@dataclass
class Ours:
    """One model on one network, solved and trained; each size of microbatch is profiled, while both
    cores train.
    """

    model: str
    network: str
    batch_size: int
    where: Sequence[Place]
    folder: Path

    @property
    def spec(self) -> Path:
        """Path of the model file, whose functions the baselines call, too."""
        return ROOT / "benchmarks" / "testbed" / "two_cores" / f"{self.model}.py"

    def cut(self, plan: Path) -> int:
        """Where the baselines are cut: as our plan for whole minibatches."""
        return cut_of(load_plan(plan), load_profile(self.profile(1)))

    def straight(self, schedule: str, microbatches: int) -> Path:
        """Find the best plan of two stages with one worker each; return its path."""
        plan = self.folder / f"{self.model}-{self.network}-{schedule}-{microbatches}.plan.json"
        cluster, profile = load_cluster(self._cluster()), load_profile(self.profile(microbatches))
        save_plan(straight_plan(profile, cluster, schedule, microbatches), plan)
        return plan

    def _cluster(self) -> Path:
        """Return the file of the cluster: the loopback as it is measured, another network as it is
        shaped.

        The workers compute on both cores, so that messages do not overlap with computation.
        """
        path = self.folder / f"{self.network}.cluster.json"
        if not path.exists():
            if self.network == "loopback":
                cluster = measure_host(len(CORES), "cpu")
            else:  # tc's "1gbit" is "1Gbps"
                bandwidth = self.network.replace("gbit", "Gbps").replace("mbit", "Mbps")
                cluster = flat_cluster(len(CORES), parse_bandwidth(bandwidth), overlap=False)
            save_cluster(cluster, path)
        return path

    def profile(self, microbatches: int) -> Path:
        """Return the profile for a microbatch, measured at the first call."""
        size = self.batch_size // microbatches
        path = self.folder / f"{self.model}-{size}.profile.json"
        if not path.exists():
            _plan(
                "profile",
                str(self.spec),
                "--device",
                "cpu",
                "--batch-size",
                str(size),
                "--seconds",
                "2",
                "--processes",
                str(len(CORES)),
                "-o",
                str(path),
            )
        return path

    def training(self, name: str, plan: Path) -> Contender:
        """Return the training of `plan` through the public command line."""
        command = ["train", str(self.spec), "--plan", str(plan), "--steps", str(FOR_EVER)]
        # A stopped worker looks as if it hung.
        command += ["--hang-timeout", str(FOR_EVER)]
        return Contender(
            name,
            self.where,
            ("planner", *command),
            self.batch_size,
            load_plan(plan).predicted.samples_per_s,
        )


def cut_of(plan: Plan, profile: Profile) -> int:
    """Return how many children of the model's sequence are in the baselines' first stage: nearest
    to the plan's cut.

    Raises:
        RunError: when the plan is not a straight pipeline of two stages.
    """
    if plan.replicas != (1, 1):
        raise RunError(
            f"the plan '{plan.config}' has no single cut that the baselines could be given"
        )
    seconds = {layer.name: layer.forward_s + layer.backward_s for layer in profile.layers}
    wanted_s = sum(seconds[name] for name in plan.stages[0].layers)
    per_child: dict[int, float] = defaultdict(float)
    for name, value in seconds.items():
        child = name.split(".")[0]
        if child.isdigit():  # the loss is in no child
            per_child[int(child)] += value
    return min(
        per_child,
        key=lambda cut: abs(sum(s for child, s in per_child.items() if child < cut) - wanted_s),
    )


def _plan(*arguments: str) -> dict[str, Any]:
    command = [
        "taskset",
        "-c",
        ",".join(map(str, CORES)),
        sys.executable,
        "-m",
        "planner",
        *arguments,
        "--json",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise RunError(
            f"plan {' '.join(arguments)} failed with exit code {done.returncode}:\n{done.stderr}"
        )
    return last_object(done.stdout) if done.stdout.strip() else json.loads("{}")
