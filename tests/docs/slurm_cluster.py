"""A Slurm cluster on this machine: a controller and nodes, each in a network namespace with a host
name of its own.

Slurm's own daemons schedule and start the jobs, and jobs reach each other by the nodes' names.
Nodes have made-up GPUs, which Slurm counts and hands out, and more CPUs than the machine has.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.netns import Host, NetworkUnavailableError, network

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
GPUS = 4  # of each node
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"}


class SlurmCluster:
    """Made by `slurm_cluster`.

    Attributes:
        nodes: by name.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self.folder = folder
        self._controller, *nodes = hosts
        self.nodes = {f"node{number}": host for number, host in enumerate(nodes, 1)}
        names = {"controller": self._controller, **self.nodes}
        lines = ["127.0.0.1 localhost", *(f"{host.address} {name}" for name, host in names.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "slurm.conf").write_text(self._configuration())
        # Slurm sets CUDA_VISIBLE_DEVICES by the numbers of these files, and opens none of them.
        (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")
        # Never used, as processes are tracked without control groups; without it slurmd looks for a
        # mounted one.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._daemons: dict[str, subprocess.Popen[str]] = {}

    def _configuration(self) -> str:
        nodes = (
            f"NodeName={name} NodeAddr={host.address} CPUs=64 RealMemory=1000 Gres=gpu:{GPUS}"
            for name, host in self.nodes.items()
        )
        return "\n".join(
            [
                "ClusterName=test",
                f"SlurmctldHost=controller({self._controller.address})",
                "SlurmUser=root",
                f"AuthInfo=socket={self.folder}/munge.socket",
                *(f"{name}={self.folder}/{file}" for name, file in _FILES.items()),
                *_SETTINGS,
                *nodes,
                "PartitionName=main Nodes=ALL Default=YES State=UP",
                "",
            ]
        )

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [
            f"--key-file={key}",
            f"--socket={files['socket']}",
            f"--pid-file={files['pid']}",
            f"--log-file={files['log']}",
            f"--seed-file={files['seed']}",
        ]
        self._daemon("munged", self._controller, ["munged", "-F", "--force", *options])
        until(files["socket"].exists, 20, "munged did not start")
        for name in self.nodes:
            (self.folder / f"spool-{name}").mkdir()
        self._daemon("controller", self._controller, ["slurmctld", "-D"])
        for name in self.nodes:
            self.start_node(name)
        until(lambda: self.states() == {"idle"}, 60, "the nodes did not come")

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self._daemon(name, self.nodes[name], ["slurmd", "-D", "-N", name])

    def states(self) -> set[str]:
        """Return the states of the nodes."""
        return set(self.call("sinfo", "-h", "-N", "-o", "%T").split())

    def call(
        self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command of Slurm on the controller, and return what it prints."""
        command = self._command("controller", self._controller, arguments)
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self._environment(env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def field(self, job: str, name: str) -> str:
        """Return a field of a job, as `scontrol show job` tells it."""
        words = self.call("scontrol", "-o", "show", "job", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def wait(self, job: str, limit_s: float) -> str:
        """Wait until a job has ended, and return its last state."""
        until(lambda: self.field(job, "JobState") in ENDED, limit_s, f"job {job} did not end")
        return self.field(job, "JobState")

    def stop(self) -> None:
        """End the daemons; jobs end with their namespaces."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _daemon(self, name: str, host: Host, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("a") as out:
            self._daemons[name] = subprocess.Popen(
                self._command(name, host, command),
                env=self._environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def _command(self, name: str, host: Host, arguments: Sequence[str]) -> list[str]:
        """Return what runs `arguments` on a host, with its name and those of the others."""
        prepare = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
        return host.command(["unshare", "--uts", "sh", "-c", prepare, "sh", *arguments])

    def _environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        path = f"{os.environ['PATH']}:/usr/sbin"
        return {
            **os.environ,
            "PATH": path,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            **(extra or {}),
        }


_FILES = {
    "StateSaveLocation": "state",
    "SlurmdSpoolDir": "spool-%n",
    "SlurmctldPidFile": "controller.pid",
    "SlurmdPidFile": "%n.pid",
    "SlurmctldLogFile": "controller.log",
    "SlurmdLogFile": "%n.log",
}
_SETTINGS = (
    "ProctrackType=proctrack/linuxproc",  # without control groups
    "TaskPlugin=task/none",
    "SwitchType=switch/none",
    "MpiDefault=none",
    "SelectType=select/cons_tres",
    "SelectTypeParameters=CR_CPU",
    "GresTypes=gpu",
    "SlurmdParameters=config_overrides",  # more CPUs than there are
    "AccountingStorageType=accounting_storage/none",
    "JobAcctGatherType=jobacct_gather/none",
    "ReturnToService=2",
    "SlurmdTimeout=15",  # until a node that does not answer is down
)


@contextmanager
def slurm_cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Yield a cluster of so many nodes; skip where Slurm is not installed, or namespaces cannot be
    made.
    """
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no Slurm here ({', '.join(missing)}): apt-get install slurm-wlm munge")
    # Not pytest's folder: a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with network(1 + nodes) as hosts:
            cluster = SlurmCluster(folder, hosts)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.stop()
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    finally:
        shutil.rmtree(folder)


def until(condition: Callable[[], object], limit_s: float, complaint: str) -> None:
    """Wait until `condition` holds; fail with `complaint` after so many seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.2)
