"""Measure the links between workers of this host, which are started for that, as training will use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

from planner.errors import InputError, PlannerError, WorkerError
from planner.formats.cluster import Cluster, load_cluster, save_cluster
from planner.formats.names import Backend, DeviceType
from planner.profiler.links.measure_cluster import measure_cluster

_LIMIT_S = 300.0
_DEFAULT = "default"


def measure_host(workers: int, device: DeviceType, backend: Backend | None = None) -> Cluster:
    """Return the cluster that so many workers of this host are.

    Args:
        workers: at least two.
        backend: that they send with; None for what suits the device.

    Raises:
        InputError: when the device or the backend is not there.
        WorkerError: when the links cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="plan-links-") as folder:
        torchrun = ["torch.distributed.run", f"--nproc-per-node={workers}", "--rdzv-backend=c10d"]
        torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--max-restarts=0", "-m", __name__]  # of torchrun
        command = [sys.executable, "-m", *torchrun, folder, device, backend or _DEFAULT]
        loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
        environment = {**loopback, "OMP_NUM_THREADS": "1", **os.environ}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as launcher:
            try:
                _, complaints = launcher.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                # Not killed: torchrun then ends its workers, which have sessions of their own.
                launcher.terminate()
                raise WorkerError(f"the links were not measured within {_LIMIT_S:g} s") from None
        reasons = sorted(Path(folder).glob("error-*"))
        if reasons:
            told = json.loads(reasons[0].read_text(encoding="utf-8"))
            kind = InputError if told["exit_code"] == InputError.exit_code else WorkerError
            raise kind(told["message"], hint=told["hint"])
        if launcher.returncode:
            last = (complaints.strip().splitlines() or [f"exit code {launcher.returncode}"])[-1]
            raise WorkerError(f"the links cannot be measured: {last}")
        return load_cluster(Path(folder) / "cluster.json")


def _worker(folder: Path, device: DeviceType, backend: Backend | None) -> None:
    try:
        cluster = measure_cluster(device=device, backend=backend)
    except PlannerError as error:
        told = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        (folder / f"error-{os.environ['RANK']}").write_text(json.dumps(told), encoding="utf-8")
        sys.exit(error.exit_code)
    if cluster is not None:  # rank 0
        save_cluster(cluster, folder / "cluster.json")


if __name__ == "__main__":
    asked = None if sys.argv[3] == _DEFAULT else cast("Backend", sys.argv[3])
    _worker(Path(sys.argv[1]), cast("DeviceType", sys.argv[2]), asked)
    os._exit(0)  # torch's teardown at interpreter exit now and then never ends when gloo was used
