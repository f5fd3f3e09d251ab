"""What `plan train` says when the user's own code fails, hangs, or diverges while it trains."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from planner.formats.plan import save_plan
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 240

MODEL = """
import os
import signal
import time

import torch
from torch import nn

FAULT = os.environ.get("FAULT")

if FAULT == "stopped at the end" and os.environ.get("RANK") == "1":
    torch.distributed.destroy_process_group = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
elif FAULT not in (None, "", "once", "stopped at the end"):
    # After an error NCCL waits for kernels that wait for a peer: what leaves a process group may
    # never return.
    def block(*_):
        time.sleep(10_000)
    torch.distributed.ProcessGroup.abort = torch.distributed.ProcessGroup.shutdown = block
    torch.distributed.destroy_process_group = block
    torch.distributed.distributed_c10d._abort_process_group = block

def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

def example_batch(batch_size):
    return (torch.randn(batch_size, 8),), torch.randint(0, 4, (batch_size,))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index == 77 and FAULT == "data":
            raise KeyError("no file 77")
        if index == 77 and FAULT == "sleep":
            time.sleep(20_000)
        if index == 77 and FAULT == "memory":
            torch.empty(2**50, dtype=torch.uint8)
        x = torch.full((8,), float("nan") if index == 77 and FAULT == "nan" else 0.1)
        return (x,), torch.tensor(9 if index == 77 and FAULT == "target" else index % 4)

def dataset():
    return Data()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

class Optimizer(torch.optim.SGD):
    steps = 0  # fails after those of the trial that every optimizer goes through

    def step(self):
        self.steps += 1
        if FAULT == "step" and self.steps == 15:
            raise ValueError("no step")
        if FAULT == "stopped" and self.steps == 15 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "once" and self.steps == 15 and not os.path.exists("failed"):
            open("failed", "w").close()
            raise ValueError("failed once")
        if FAULT in ("raised", "killed") and self.steps == 14 + int(os.environ["RANK"]):
            if os.environ["RANK"] == "0":  # as in a call of CUDA that waits for the other worker
                time.sleep(10_000)
            if FAULT == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("fifth")
        super().step()

def optimizer(parameters):
    return Optimizer(parameters, lr=0.01)
"""


def line_of(text: str) -> int:
    """Of the model file."""
    return next(number for number, line in enumerate(MODEL.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file and a plan "1-1" for it."""
    folder = tmp_path_factory.mktemp("failures")
    path = folder / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), folder / "plan.json")
    return folder


def failing(
    folder: Path, fault: str, *arguments: str, launcher: tuple[str, ...] = ()
) -> tuple[int, list[str]]:
    """Exit code and stderr's lines of a run with `fault` in the user's code."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", *launcher, "planner", "train", "model.py"),
            *("--epochs", "1", *arguments),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.strip().splitlines()


@pytest.mark.slow
def test_user_code_that_blocks_is_named_with_its_line(folder: Path) -> None:
    code, lines = failing(folder, "sleep", "--hang-timeout", "5")
    assert code == 1
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: worker 0 (stage 0): has not moved for ")
    assert "in the forward of minibatch " in lines[0]
    assert lines[0].endswith(f", at model.py:{line_of('time.sleep(20_000)')} in __getitem__()")


def srun(folder: Path, fault: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of two processes with the variables that srun sets for two tasks
    on one node.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }
    job |= {
        "MASTER_PORT": str(port),
        "FAULT": fault,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "planner", "train", "model.py", "--epochs", "1", "--json"],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.slow
def test_tasks_of_slurm_train_as_workers_of_torchrun(folder: Path) -> None:
    first, second = srun(folder, "")
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert json.loads(first[1])["workers"] == 2
    assert second[1] == ""


@pytest.mark.slow
def test_a_failing_task_of_slurm_ends_all_with_one_reason(folder: Path) -> None:
    tasks = srun(folder, "data")  # of worker 0, which holds the store
    assert [code for code, _, _ in tasks] == [1, 1]
    (told,) = (
        line for _, _, text in tasks for line in text.splitlines() if line.startswith("error: ")
    )
    assert told.startswith("error: worker 0 (stage 0), in the forward of minibatch ")


@pytest.mark.slow
def test_under_torchrun_a_failing_dataset_is_told_once_with_its_line(folder: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    code, lines = failing(folder, "data", launcher=torchrun)
    assert code == 1
    (told,) = (line for line in lines if line.startswith("error: "))
    assert told.startswith("error: worker 0 (stage 0), in the forward of minibatch ")
    assert told.endswith(f": KeyError: 'no file 77' (model.py:{line_of('no file')})")
    assert not any("gloo" in line or "Connection" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "start", "end"),
    [
        (
            "target",
            "worker 1 (stage 1), in the forward of minibatch ",
            f"IndexError: Target 9 is out of bounds. (loss() at model.py:{line_of('def loss')})",
        ),
        (
            "step",
            "worker ",
            "in the update after minibatch 14: ValueError: no step "
            f"(model.py:{line_of('no step')})",
        ),
        (
            "memory",
            "worker 0 (stage 0), in the forward of minibatch ",
            f" (Cannot allocate memory) (model.py:{line_of('torch.empty')})",
        ),
        ("nan", "worker 1 (stage 1), in the backward of minibatch ", " is nan"),
    ],
)
def test_the_first_failure_is_named_in_one_sentence(
    folder: Path, fault: str, start: str, end: str
) -> None:
    code, lines = failing(folder, fault, "--stop-on-nan")
    assert code == 1
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"error: {start}")
    assert lines[0].endswith(end)


@pytest.mark.slow
def test_under_torchrun_code_that_blocks_is_named_with_its_line(folder: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    code, lines = failing(folder, "sleep", "--hang-timeout", "5", launcher=torchrun)
    assert code == 1
    (told,) = (line for line in lines if line.startswith("error: "))
    assert told.startswith("error: worker 0 (stage 0): has not moved for ")
    assert told.endswith(f", at model.py:{line_of('time.sleep(20_000)')} in __getitem__()")


@pytest.mark.slow
def test_under_torchrun_the_next_worker_names_the_first_which_judges_all_and_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2"
    )  # a stopped process does not end when it is asked to
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    code, lines = failing(folder, "stopped", "--hang-timeout", "5", launcher=torchrun)
    assert code == 1
    (told,) = (line for line in lines if line.startswith("error: "))
    assert told.startswith("error: worker 0 (stage 0): has not moved for ")
    assert "it does not respond" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [(), ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")]
)
def test_a_worker_that_is_stopped_after_its_last_minibatch_is_missed(
    folder: Path, launcher: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0, which judges, has done all its work by then, and ended."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    arguments = ("--hang-timeout", "4")
    code, lines = failing(folder, "stopped at the end", *arguments, launcher=launcher)
    assert code == 1
    (told,) = (line for line in lines if line.startswith("error: "))
    assert told.startswith("error: worker 1 (stage 1): has not moved for ")
    assert "it does not respond" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "raised",
            f", in the update after minibatch 14: ValueError: fifth (model.py:{line_of('fifth')})",
        ),
        ("killed", ": its process is gone and left no reason; last heard of "),
    ],
)
def test_a_worker_that_waits_ends_with_the_cause_that_another_host_reports(
    folder: Path, fault: str, told: str
) -> None:
    """Each torchrun stands for a host. Nothing but the watch's thread can end the first worker
    before the time-out.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    arguments = ["-m", "planner", "train", "model.py", "--steps", "24", "--hang-timeout", "100000"]
    environment = {**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(
            [*command, f"--node-rank={rank}", *arguments],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [host.communicate(timeout=TIMEOUT_S) for host in hosts]
    finally:
        for host in hosts:
            host.terminate()
    assert all(host.returncode for host in hosts)
    errors = [
        [line for line in err.splitlines() if line.startswith("error: ")] for _, err in outputs
    ]
    said = f"error: worker 1 (stage 1){told}"
    assert [len(told) for told in errors] == [1, 1 if fault == "raised" else 0], outputs
    assert all(line.startswith(said) for lines in errors for line in lines), outputs


@pytest.mark.slow
def test_torchruns_restarts_go_on_from_checkpoints_of_the_same_run_alone(
    folder: Path, tmp_path: Path
) -> None:
    """torchrun calls all runs "none" that it was not given an id for."""
    for name in ("model.py", "plan.json"):
        (tmp_path / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")

    def run() -> subprocess.CompletedProcess[str]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        launcher = (
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--max-restarts=1",
            f"--master-port={port}",
        )
        arguments = ("--steps", "24", "--checkpoint-every", "10", "--json")
        return subprocess.run(
            [sys.executable, "-m", *launcher, "-m", "planner", "train", "model.py", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            env={**os.environ, "FAULT": "once", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    done = run()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["first_minibatch"] == 10
    assert [entry["minibatch"] for entry in result["losses"]] == list(range(24))
    done = run()
    assert done.returncode != 0
    assert done.stdout == ""
    assert (
        done.stderr.count("has checkpoints of an earlier run, the newest step-00000024") >= 2
    )  # both starts


@pytest.mark.slow
def test_hosts_with_different_arguments_are_refused(folder: Path) -> None:
    (folder / "each.py").write_text(
        "import os, sys\n"
        "sys.argv = ['plan', 'train', 'model.py', '--steps', str(5 + int(os.environ['RANK']))]\n"
        "from planner.cli.main import main\n"
        "sys.exit(main())\n",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "each.py",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
    )
    assert done.returncode != 0
    host = socket.gethostname()
    assert (
        f"error: worker 1 ({host}) began with --steps 6, and worker 0 ({host}) with --steps 5"
        in done.stderr
    )
