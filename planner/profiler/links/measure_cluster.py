"""Measure the links between workers, in a job or on this host -> the Cluster that `plan solve`
takes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from planner.errors import InputError, PlannerError, WorkerError, first_line
from planner.formats.cluster import Cluster, load_cluster, save_cluster
from planner.formats.held_folder import held_folder
from planner.formats.names import Backend, DeviceType
from planner.profiler.links.effort import BUCKET_BYTES, BUDGET_S, MESSAGE_BYTES, Effort
from planner.profiler.links.levels import LevelMeasurement
from planner.workers import start_here
from planner.workers.groups import GLOO
from planner.workers.interfaces import LOOPBACK, VARIABLES
from planner.workers.meeting import exchange, group_store, started_as_worker, worker_store
from planner.workers.place import choose_place, own_seat, set_gpu_variables, take

_TIMEOUT = timedelta(seconds=120)  # for one message
_LIMIT_S = 300.0  # for this host's links
_DEFAULT = "default"  # stands for no backend


def measure_cluster(
    *,
    message_bytes: int = MESSAGE_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    device: DeviceType | None = None,
    backend: Backend | None = None,
    budget_s: float = BUDGET_S,
    announce: Callable[[int, float], None] | None = None,
) -> Cluster | None:
    """Measure the links between all workers of this torchrun job; each of them must call this.

    Args:
        device: the kind that messages come from; None for GPUs where there are any.
        backend: that sends them: "gloo" or "nccl"; None for NCCL with GPUs.
        budget_s: seconds that the measurement may take once the workers have met; on slow links
            less is sent.
        announce: called on rank 0 before the measurement with the number of workers and the
            seconds that it will take.

    Returns:
        On rank 0 the cluster: one level for the workers of a host where it has several, one for the
        hosts where there are several. None on the others. Where a host's workers compute on all of
        its cores, messages do not overlap with computation.

    Raises:
        InputError: outside torchrun, with a single worker, or with hosts of different sizes.
        WorkerError: when the workers cannot reach each other.
    """
    if not started_as_worker():
        raise InputError(
            "the links between workers are measured by those workers, and torchrun did not start "
            "this process",
            hint="run the same command on each host under torchrun, the second with --node-rank "
            "1: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 "
            "--master-addr HOST0 --master-port 29500 -m planner ...",
        )

    torch.set_num_threads(1)
    set_gpu_variables()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = worker_store(_TIMEOUT)
        place = choose_place(exchange(store, own_seat(device=device)), rank, device, backend)
        take(place)
        store = group_store(_TIMEOUT)
        dist.init_process_group(GLOO, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
        try:
            effort = Effort(message_bytes=message_bytes, bucket_bytes=bucket_bytes)
            measurement = LevelMeasurement(place, _TIMEOUT, effort)
            expected_s = measurement.fit(budget_s)
            if announce is not None and rank == 0:
                announce(world, expected_s)

            levels, times, overlap = (
                measurement.levels(),
                measurement.codec_times(),
                measurement.overlap,
            )
        finally:
            dist.destroy_process_group()
    # what torch.distributed raises for lost or unreachable peers
    except (RuntimeError, ValueError) as cause:
        raise WorkerError(
            f"the links cannot be measured: {first_line(cause)}",
            hint="do all hosts reach each other? GLOO_SOCKET_IFNAME names the network interface "
            "to use",
        ) from cause

    if not levels:
        return None
    return Cluster(levels=levels, backend=place.backend, overlap=overlap, codec_times=times)


def measure_host(
    workers: int,
    device: DeviceType,
    backend: Backend | None = None,
    *,
    limit_s: float = _LIMIT_S,
) -> Cluster:
    """Return the cluster that so many workers of this host are, at least two.

    Raises:
        InputError: where `backend` does not send from such devices.
        WorkerError: where the links cannot be measured, or not within `limit_s`.
    """
    with held_folder("links") as held:
        folder = str(held)
        command = [sys.executable, "-m", start_here.__name__, folder, str(workers), __name__]
        command += [folder, device, backend or _DEFAULT]
        loopback = dict.fromkeys(VARIABLES, LOOPBACK)
        environment = {**loopback, **os.environ}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as launcher:
            try:
                _, complaints = launcher.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                # Not killed: the launcher then ends its workers, which have sessions of their own.
                launcher.terminate()
                raise WorkerError(f"the links were not measured within {limit_s:g} s") from None
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
    _worker(Path(sys.argv[1]), sys.argv[2], asked)
    os._exit(0)  # torch's teardown at interpreter exit now and then never ends when gloo was used
