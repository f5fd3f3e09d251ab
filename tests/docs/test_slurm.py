"""The scripts for Slurm, submitted to a Slurm cluster of two nodes on this machine: they train, and
end when they fail.

Skipped where Slurm is not installed (`apt-get install slurm-wlm munge`), or without the right to
make namespaces.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.netns import INTERFACE
from planner.formats.plan import save_plan
from tests.docs.slurm_cluster import SlurmCluster, slurm_cluster, until
from tests.docs.test_scripts import SCRIPTS
from tests.executor.plans import make_plan, structural_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STARTS_WITHIN_S = 300
ENDS_WITHIN_S = 120
REQUEUED_WITHIN_S = 400  # Slurm waits for two minutes before it starts a job again
EPOCH = 40  # minibatches


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(nodes=2) as made:
        yield made


def submit(cluster: SlurmCluster, folder: Path, script: str, epochs: int) -> str:
    """Submit a script with a plan for a worker on each node, and other numbers where the script
    asks to change them.
    """
    save_plan(make_plan(structural_profile(folder / "model.py", 16), (1, 1)), folder / "plan.json")
    text = (SCRIPTS / script).read_text(encoding="utf-8")
    for asked, here in (
        ("nproc-per-node 4", "nproc-per-node 1"),
        ("epochs 10", f"epochs {epochs}"),
        ("500", "100"),
    ):
        text = text.replace(asked, here)
    (folder / script).write_text(text, encoding="utf-8")
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin",
        "PYTHONPATH": str(SCRIPTS.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    options = ("--parsable", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
    job = cluster.call("sbatch", *options, script, cwd=folder, env=variables).strip()
    assert job.isdigit(), job
    return job


def said(folder: Path, job: str) -> str:
    return (folder / f"slurm-{job}.out").read_text()


def minibatches(folder: Path) -> list[int]:
    """The numbers of the minibatches whose losses a run has recorded, from the first on."""
    lines = (folder / "checkpoints" / "losses.jsonl").read_text().splitlines()
    return [number for line in lines for number, _ in json.loads(line).get("losses", [])]


def await_checkpoint(folder: Path) -> None:
    until(lambda: list(folder.glob("checkpoints/step-*")), STARTS_WITHIN_S, "it did not train")


def worker_on(cluster: SlurmCluster, node: str) -> int:
    """The process id of the worker on a node."""
    listed = subprocess.run(
        ["ip", "netns", "pids", cluster.nodes[node].name],
        capture_output=True,
        text=True,
        check=True,
    )
    commands = {
        int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for pid in listed.stdout.split()
    }
    (worker,) = (
        pid
        for pid, command in commands.items()
        if command[0] == sys.executable.encode() and b"train" in command
    )
    return worker


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_torchrun.sbatch"])
def test_the_script_trains_on_two_nodes(cluster: SlurmCluster, folder: Path, script: str) -> None:
    job = submit(cluster, folder, script, epochs=3)
    assert cluster.wait(job, STARTS_WITHIN_S) == "COMPLETED", said(folder, job)
    assert cluster.field(job, "ExitCode") == "0:0"
    assert "device        cpu, messages over gloo" in said(folder, job)
    assert minibatches(folder) == list(range(3 * EPOCH))


def test_a_task_that_is_killed_ends_the_job_with_the_reason(
    cluster: SlurmCluster, folder: Path
) -> None:
    job = submit(cluster, folder, "slurm.sbatch", epochs=100000)
    await_checkpoint(folder)
    os.kill(worker_on(cluster, "node2"), signal.SIGKILL)
    assert cluster.wait(job, ENDS_WITHIN_S) == "FAILED"
    assert cluster.field(job, "ExitCode") == "137:0"
    assert "error: worker 1 (stage 1): its process is gone and left no reason" in said(folder, job)


def test_a_task_that_fails_ends_the_job_with_its_exit_code(
    cluster: SlurmCluster, folder: Path
) -> None:
    with (folder / "model.py").open("a") as model:
        model.write(
            "\n\ndef on_update(minibatch, loss, metrics):\n    assert minibatch < 50, 'my own "
            "fault'\n"
        )
    job = submit(cluster, folder, "slurm.sbatch", epochs=100000)
    assert cluster.wait(job, STARTS_WITHIN_S) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0"
    assert "AssertionError: my own fault" in said(folder, job)


def test_a_job_whose_node_goes_down_starts_again_and_resumes(
    cluster: SlurmCluster, folder: Path
) -> None:
    with (folder / "model.py").open("a") as model:  # not so fast that it has ended before
        model.write(
            "\n\ndef on_update(minibatch, loss, metrics):\n    import time\n\n    "
            "time.sleep(0.02)\n"
        )
    job = submit(cluster, folder, "slurm.sbatch", epochs=20)
    await_checkpoint(folder)
    link = ["ip", "-n", cluster.nodes["node2"].name, "link", "set", INTERFACE]
    subprocess.run([*link, "down"], check=True)
    until(lambda: cluster.field(job, "JobState") == "PENDING", ENDS_WITHIN_S, "it was not requeued")
    subprocess.run([*link, "up"], check=True)
    assert cluster.wait(job, REQUEUED_WITHIN_S) == "COMPLETED"
    assert cluster.field(job, "Restarts") == "1"
    assert "Node failure on node2" in said(folder, job)  # kept, before what the second start says
    assert re.search(r"resumed from +checkpoints/step-0*[1-9]", said(folder, job)), said(
        folder, job
    )
    # each once: those after the checkpoint were trained again
    assert minibatches(folder) == list(range(20 * EPOCH))
