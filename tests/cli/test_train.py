"""`plan train` as a process: results, wrong input, killed workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from planner.errors import PlanError
from planner.executor.run.agreement import start_worker
from planner.formats.plan import load_plan, save_plan
from planner.formats.timeline import Timeline
from planner.model.spec import load_model_file
from planner.reporting.trace import load_run
from planner.workers.job import Job
from tests.campaigns.kills.workers import minibatch_of, store_of, workers_of
from tests.cli.in_process import plan
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

pytestmark = pytest.mark.usefixtures("warm_start")

TIMEOUT_S = 120
LOOPBACK = {"0100007F"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file and a plan "1-1" for it."""
    folder = tmp_path_factory.mktemp("train")
    path = write_model(folder, "convolutional", "sgd").rename(folder / "model.py")
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), folder / "plan.json")
    return folder


def plan_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `plan train` in `folder`."""
    return plan("train", *arguments, cwd=folder)


def assert_one_sentence(process: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """The documented exit code, one `error:` line with `parts`, a hint, no traceback, nothing on
    stdout.
    """
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    lines = process.stderr.strip().splitlines()
    assert lines[0].startswith("error: "), process.stderr
    assert lines[1].strip().startswith("hint: "), process.stderr
    assert len(lines) == 2, process.stderr
    for part in parts:
        assert part in lines[0]
    assert process.stdout == ""


def test_a_run_reports_prediction_and_measurement_and_traces_the_last_minibatches(
    folder: Path,
) -> None:
    process = plan_train(
        folder,
        *("model.py", "--steps", "40", "--deterministic", "--json"),
        *("--save-weights", "weights.pt", "--trace", "run.json", "--trace-minibatches", "4"),
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["config"] == "1-1"
    assert (result["device"], result["device_name"], result["backend"]) == ("cpu", None, "gloo")
    assert result["samples_per_s"] > 0
    assert result["predicted_samples_per_s"] > 0
    assert [entry["minibatch"] for entry in result["losses"]] == list(range(40))
    assert [report["rank"] for report in result["reports"]] == [0, 1]
    assert all(0 < report["busy_share"] <= 1 for report in result["reports"])
    assert result["random_data"] is True
    model = load_model_file(str(folder / "model.py")).build_model()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    check_trace(load_run(folder / "run.json"), range(36, 40))


def test_the_table_is_for_people(folder: Path) -> None:
    process = plan_train(folder, "model.py", "--steps", "20")
    assert process.returncode == 0, process.stderr
    assert "samples/s in steady state" in process.stdout
    assert "cpu, messages over gloo" in process.stdout
    assert "predicted" in process.stdout
    assert "the model file has no dataset()" in process.stdout


def test_the_data_parallel_baseline_runs_on_as_many_workers(folder: Path) -> None:
    process = plan_train(
        folder, "model.py", "--steps", "21", "--baseline", "data-parallel", "--json"
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["schedule"] == "data-parallel"
    assert result["workers"] == 2
    assert result["minibatches"] == 22


def test_the_data_parallel_baseline_saves_no_weights(folder: Path) -> None:
    arguments = ("--steps", "8", "--baseline", "data-parallel", "--save-weights", "weights.pt")
    assert_one_sentence(plan_train(folder, "model.py", *arguments), 2, "--save-weights")


def test_missing_files(folder: Path) -> None:
    assert_one_sentence(plan_train(folder, "model.py", "--plan", "none.json"), 2, "none.json")
    assert_one_sentence(plan_train(folder, "none.py"), 2, "none.py")


def test_a_plan_for_another_model_is_refused(folder: Path) -> None:
    other = write_model(folder, "language", "sgd")
    assert_one_sentence(
        plan_train(folder, other.name, "--steps", "3"), 2, "another model", other.name
    )


def test_a_plan_without_a_model_is_refused(folder: Path) -> None:
    plan = load_plan(folder / "plan.json").model_copy(update={"graph_hash": None})
    save_plan(plan, folder / "imported.json")
    assert_one_sentence(
        plan_train(folder, "model.py", "--plan", "imported.json"), 2, "imported profile"
    )


def test_a_plan_for_another_kind_of_device_is_refused(folder: Path) -> None:
    done = plan_train(folder, "model.py", "--device", "tpu")
    assert_one_sentence(done, 2, "--device tpu is no kind of device: PyTorch offers ", "tried")
    done = plan_train(folder, "model.py", "--device", "cuda")
    assert_one_sentence(done, 2, "the plan was made for cpu (", "mean nothing for --device cuda")
    plan = load_plan(folder / "plan.json")
    device = plan.device.model_copy(update={"kind": "cuda", "name": "NVIDIA L4"})
    save_plan(plan.model_copy(update={"device": device}), folder / "cuda.json")
    done = plan_train(folder, "model.py", "--plan", "cuda.json")
    assert_one_sentence(
        done, 2, "the plan was made for GPUs (NVIDIA L4), and PyTorch sees none here"
    )
    done = plan_train(folder, "model.py", "--plan", "cuda.json", "--device", "cpu")
    assert_one_sentence(
        done,
        2,
        "the plan was made for cuda (NVIDIA L4), and its times mean nothing for --device cpu",
    )


def test_nccl_between_cpus_is_refused(folder: Path) -> None:
    assert_one_sentence(
        plan_train(folder, "model.py", "--backend", "nccl"), 2, "--backend nccl sends from GPUs"
    )


def test_a_plan_edited_into_a_deadlock_is_refused(folder: Path) -> None:
    plan = load_plan(folder / "plan.json")
    starving = plan.stages[1].model_copy(update={"in_flight": 5})
    save_plan(
        plan.model_copy(update={"stages": (plan.stages[0], starving)}), folder / "deadlock.json"
    )
    assert_one_sentence(
        plan_train(folder, "model.py", "--plan", "deadlock.json"), 2, "in_flight [2, 5]"
    )


def test_lengths_that_mean_nothing_are_refused(folder: Path) -> None:
    assert_one_sentence(plan_train(folder, "model.py", "--steps", "0"), 2, "--steps 0 is too small")
    assert_one_sentence(
        plan_train(folder, "model.py", "--epochs", "2"), 2, "--epochs needs a dataset()"
    )


def test_another_number_of_workers_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    job = Job(model=str(folder / "model.py"), plan=load_plan(folder / "plan.json"), steps=3)
    with pytest.raises(PlanError, match="plan '1-1' needs 2 workers, but 1 were started"):
        start_worker(job)


@pytest.mark.slow
def test_torchrun_with_another_number_of_workers_is_refused(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "planner", "train", "model.py", "--steps", "3"]
    process = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ,
    )
    assert process.returncode != 0
    assert "error: plan '1-1' needs 2 workers, but 1 were started" in process.stderr


def test_plain_torchrun_runs_the_same_plan_and_warns_of_checks_of_every_collective(
    folder: Path,
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "planner", "train", "model.py", "--steps", "12", "--json"]
    process = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["config"] == "1-1"
    assert process.stderr.count("TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective first") == 1
    told = [line for line in process.stderr.splitlines() if line.startswith("minibatch ")]
    assert not told, "no progress where stderr is no terminal"


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


_LONG_RUNS: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def end_long_runs() -> Iterator[None]:
    """End the runs that a failed test leaves."""
    yield
    while _LONG_RUNS:
        process = _LONG_RUNS.pop()
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


def start_long_run(
    folder: Path, *arguments: str, plan: str = "plan.json", until: int = 3
) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that would take hours, and its workers by rank once all have come to minibatch
    `until`.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "planner", "train", "model.py"),
            *("--plan", plan, "--steps", "100000000", *arguments),
            *("--drift-window", "0"),  # the plan is of another machine
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _LONG_RUNS.append(process)
    deadline = time.monotonic() + 4 * TIMEOUT_S
    workers = load_plan(folder / plan).workers
    while time.monotonic() < deadline and process.poll() is None:
        pids = workers_of(process.pid)
        if len(pids) == workers:
            with suppress(OSError, RuntimeError):
                store = store_of(pids[0])
                if all((minibatch_of(store, rank) or 0) >= until for rank in pids):
                    return process, [pids[rank] for rank in range(workers)]
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"the workers did not start to train: {process.communicate()}")


def listening(pid: int) -> set[str]:
    """Local addresses, in hexadecimal as the kernel writes them, of the ports that the process
    listens on.
    """
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_worker_ends_the_run_with_its_name_and_leaves_no_process(
    folder: Path, victim: int
) -> None:
    """And all ports listen on the loopback alone."""
    process, workers = start_long_run(folder)
    assert set().union(*map(listening, (process.pid, *workers))) == LOOPBACK
    os.kill(workers[victim], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    name = f"worker {victim} (stage {victim})"
    assert_one_sentence(done, 1, "was killed by SIGKILL, last heard of ", "minibatch ", name)
    assert not any(is_alive(worker) for worker in workers)


def test_workers_end_with_a_killed_launcher(folder: Path) -> None:
    process, workers = start_long_run(folder)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(worker) for worker in workers)


@pytest.mark.slow
def test_an_interrupted_run_without_checkpoints_says_what_would_have_saved_it(folder: Path) -> None:
    process, workers = start_long_run(folder)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert (
        "nothing was saved: with --checkpoint-every N a run writes checkpoints, and --resume "
        "continues it" in err
    )
    assert not any(is_alive(worker) for worker in workers)


def test_interrupting_ends_everything_with_code_130_and_says_how_it_continues(folder: Path) -> None:
    process, workers = start_long_run(folder, "--checkpoint-every", "5")
    deadline = time.monotonic() + TIMEOUT_S
    while not list(folder.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "the same command with --resume continues from the newest in 'checkpoints'" in err
    assert not any(is_alive(worker) for worker in workers)


@pytest.mark.slow
def test_a_stopped_worker_ends_the_run_in_time(folder: Path) -> None:
    process, workers = start_long_run(folder, "--hang-timeout", "8")
    os.kill(workers[1], signal.SIGSTOP)
    out, err = process.communicate(timeout=TIMEOUT_S)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    assert_one_sentence(
        done, 1, "worker 1 (stage 1): has not moved for ", "minibatch ", "it does not respond"
    )
    assert not any(is_alive(worker) for worker in workers)


def test_an_unknown_interface_is_refused(folder: Path) -> None:
    assert_one_sentence(
        plan_train(folder, "model.py", "--interface", "none7"), 2, "'none7' is no network interface"
    )


def check_trace(timeline: Timeline, minibatches: range) -> None:
    """The trace has what every worker did in these last minibatches."""
    assert timeline.source == "measured"
    assert timeline.config == "1-1"
    events = list(timeline.events.rows())
    for rank in (0, 1):
        for kind in ("forward", "backward"):
            assert sum((event.rank, event.kind) == (rank, kind) for event in events) == 4
        # The first worker's update by an earlier minibatch comes after its forward of the first one
        # that is kept.
        assert sum((event.rank, event.kind) == (rank, "update") for event in events) == 5 - rank
    forwards = {(event.rank, event.minibatch): event for event in events if event.kind == "forward"}
    assert min(event.start_s for event in forwards.values()) == 0.0
    for minibatch in minibatches:
        assert forwards[0, minibatch].end_s <= forwards[1, minibatch].start_s
    assert [curve.rank for curve in timeline.memory] == [0, 1]
    for curve in timeline.memory:
        assert len(curve.time_s) == 13 - curve.rank  # after each forward, backward and update
        assert min(curve.held_bytes) > 0


def test_a_window_of_no_minibatches_is_refused(folder: Path) -> None:
    process = plan_train(folder, "model.py", "--trace-minibatches", "0")
    assert process.returncode == 2
    assert "--trace-minibatches 0 is too small" in process.stderr
