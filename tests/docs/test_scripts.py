"""The scripts that the documentation offers: read by shellcheck, parsed, and run where one machine
is enough.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.cli.main import build_parser

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "scripts"
SHELL = sorted((*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")))
SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    if not SHELLCHECK.exists():
        pytest.skip("shellcheck is not installed: pip install '.[test]'")
    done = subprocess.run(
        [SHELLCHECK, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def planner_commands(text: str) -> list[list[str]]:
    """The arguments that `plan` gets in a script, as far as they can be read without running it."""
    joined = text.replace("\\\n", " ").replace("'", " ")
    found = []
    for line in joined.split("\n"):
        for start in ("plan ", "-m planner "):
            code = line.partition(" #")[0].strip()
            if not code.startswith("#") and (code.startswith(start) or f" {start}" in code):
                rest = code[code.index(start) + len(start) :]
                found.append(shlex.split(rest.replace('"${beside[@]}"', "")))
                break
    return found


@pytest.mark.parametrize(
    "script", [*SHELL, *sorted(SCRIPTS.glob("*.yaml"))], ids=lambda path: path.name
)
def test_plan_takes_the_commands_of_scripts(script: Path) -> None:
    found = planner_commands(script.read_text(encoding="utf-8"))
    assert found
    for words in found:
        # What a variable holds is not known here; 3 is a number, a file and a kind of GPU.
        build_parser().parse_args(
            ["3" if "$" in word and not word.endswith(".json") else word for word in words]
        )


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_sbatch_options_stand_before_the_first_command(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options
    assert max(options) < first_command
    asked = dict(
        lines[n].removeprefix("#SBATCH --").split("=", 1) for n in options if "=" in lines[n]
    )
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"} <= set(asked)


def test_the_jobset_has_what_the_api_asks_for() -> None:
    """Checked field by field. JobSet 0.8.1, 0.11.1 and 0.12.0 accept the file by their schemas."""
    job: dict[str, Any] = yaml.safe_load((SCRIPTS / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) == {"network", "failurePolicy", "replicatedJobs"}
    (hosts,) = job["spec"]["replicatedJobs"]
    assert set(hosts) == {"name", "replicas", "template"}
    spec = hosts["template"]["spec"]
    assert set(spec) == {"completionMode", "parallelism", "completions", "backoffLimit", "template"}
    # pods then have a number, and names that others can look up
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    assert set(pod) == {"restartPolicy", "containers", "volumes"}
    assert pod["restartPolicy"] == "Never"
    assert spec["parallelism"] == spec["completions"]
    command = command_of_hosts(pod, spec["completions"])
    assert (
        f"--master-addr {job['metadata']['name']}-{hosts['name']}-0-0.{job['metadata']['name']} "
        in command
    )
    assert f"--master-port {pod['containers'][0]['ports'][0]['containerPort']} " in command


def test_the_pytorchjob_has_what_the_operator_asks_for() -> None:
    """Checked field by field. Operators 1.7.0, 1.8.1 and 1.9.0 accept the file by their schemas."""
    job: dict[str, Any] = yaml.safe_load(
        (SCRIPTS / "kubernetes_pytorchjob.yaml").read_text(encoding="utf-8")
    )
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) == {"runPolicy", "pytorchReplicaSpecs"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    hosts = sum(each["replicas"] for each in replicas.values())
    for each in replicas.values():
        assert set(each) == {"replicas", "restartPolicy", "template"}
        assert each["restartPolicy"] == "OnFailure"  # the whole job meets again
        pod = each["template"]["spec"]
        # the operator sets the environment of this one
        assert pod["containers"][0]["name"] == "pytorch"
        command = command_of_hosts(pod, hosts)
        assert '--node-rank "$RANK" ' in command
        assert '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" ' in command


def command_of_hosts(pod: dict[str, Any], hosts: int) -> str:
    """Return the command of a pod that is one host of so many, with as many workers as it
    has GPUs.
    """
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    command: str = container["command"][-1]
    assert f"--nnodes {hosts} " in command
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command
    return command


def start(folder: Path, script: str, **variables: str) -> subprocess.Popen[str]:
    """Start a script as a user would, with the programs of `folder` first."""
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(SCRIPTS.parents[1])}
    return subprocess.Popen(
        [SCRIPTS / script, "model.py"],
        cwd=folder,
        env={**os.environ, **path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_host_and_then_two(folder: Path) -> None:
    """The script for one host, and with its plan the script for several hosts, started
    twice here.
    """
    alone = start(folder, "one_host.sh", EPOCHS="2", CHECKPOINT_EVERY="20")
    said, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, said
    assert (folder / "model.safetensors").exists()
    shutil.rmtree(folder / "checkpoints")
    asked = {
        "HOST0": "127.0.0.1",
        "HOSTS": "2",
        "GPUS": "1",
        "PORT": "29533",
        "EPOCHS": "2",
        "CHECKPOINT_EVERY": "20",
    }
    hosts = [
        start(folder, "several_hosts.sh", HOST=str(host), INTERFACE="lo", **asked)
        for host in range(2)
    ]
    for host in hosts:
        said, _ = host.communicate(timeout=300)
        assert host.returncode == 0, said
    assert list((folder / "checkpoints").glob("step-*"))
