"""Run several training jobs in one set of real worker processes: starting processes takes longer than the jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from planner.devices.place import CPU
from planner.executor.communication.control import join_group
from planner.executor.job import Job, TrainResult
from planner.executor.run.context import pipeline_context
from planner.executor.run.train import train
from planner.model.spec import load_model_file

TIMEOUT_S = 240


def run_jobs(jobs: Sequence[Job], folder: Path) -> list[TrainResult]:
    """Run `jobs`, which all need the same number of workers, one after the other under plain torchrun."""
    paths = []
    for index, job in enumerate(jobs):
        path = folder / f"job-{index}.json"
        path.write_text(job.model_dump_json(), encoding="utf-8")
        paths.append(str(path))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={jobs[0].plan.workers}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", __file__, *paths]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path.cwd()
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers
            output, _ = process.communicate()
            raise AssertionError(f"the workers did not end within {TIMEOUT_S} s:\n{output}") from None
    assert process.returncode == 0, output
    return [TrainResult.model_validate_json(Path(f"{path}.result").read_text("utf-8")) for path in paths]


def _worker(paths: Sequence[str]) -> None:
    torch.set_num_threads(1)
    joined = False
    for path in paths:
        job = Job.model_validate_json(Path(path).read_text("utf-8"))
        context = pipeline_context(job, load_model_file(job.model), CPU)
        if not joined:
            join_group()
            joined = True
        result = train(context)
        if result is not None:
            Path(f"{path}.result").write_text(result.model_dump_json(), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _worker(sys.argv[1:])
