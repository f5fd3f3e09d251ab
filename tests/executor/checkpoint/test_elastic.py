"""A run that loses hosts goes on from the memories of the others, as one that was stopped and
resumed there does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

import planner
from planner.api.running import check_elastic
from planner.errors import InputError, PlanError
from planner.executor.checkpoint import known_copies
from planner.executor.checkpoint.folders import after_torchrun_restart
from planner.executor.checkpoint.recovery import await_end, recover
from planner.executor.run.train import train_worker
from planner.formats.plan import Plan
from planner.options.training import CheckpointOptions, ElasticOptions
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job, TrainResult
from tests.executor.models import DATASET, write_model
from tests.executor.plans import make_plan, sharded, structural_profile
from tests.executor.processes import _ENVIRONMENT, TIMEOUT_S, _warm, run_jobs, run_to_end
from tests.samples import layer, profile

SEED, EVERY, STEPS = 3, 5, 24
AWAITED_S = 4.0  # for holders of a newer copy
# Has a schedule of rates. Fails once, on the worker with the loss: after a minibatch that the test
# names, when the copy before it is complete on so many hosts.
FAILS = """
import time
from pathlib import Path

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)

def on_update(minibatch, loss, metrics):
    at = Path(__file__).with_name("fails-at")
    fails, copy, hosts = map(int, at.read_text().split()) if at.exists() else (-1, 0, 0)
    if minibatch == fails:
        while copy and len(list(at.parent.glob(f"memory-*/*/step-{copy:08}-*/index.json"))) < hosts:
            time.sleep(0.01)
        at.unlink()
        raise RuntimeError("it fails as told")
"""


def job_of(path: Path, plan: Plan, steps: int = STEPS) -> Job:
    elastic = ElasticOptions(elastic=(1, 4), rendezvous="nowhere:1", copy_every=EVERY)
    return Job(model=str(path), plan=plan, steps=steps, seed=SEED, elastic=elastic, run="one run")


def start(job: Job, hosts: Sequence[int], folder: Path, per_host: int = 1) -> TrainResult | None:
    """Start the workers of some hosts, whose memories are folders; return the result, or None after
    a failure.
    """
    world = len(hosts) * per_host
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    common = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
    }
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    workers = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank % per_host, "GROUP_RANK": rank // per_host}
        variables = (
            os.environ
            | _ENVIRONMENT
            | {name: str(value) for name, value in (common | place).items()}
        )
        memory = str(folder / f"memory-{hosts[rank // per_host]}")
        options = vars(job.elastic) | {
            "copy_folder": memory,
            "rendezvous": f"127.0.0.1:{store.port}",
        }
        own = job.model_copy(update={"elastic": ElasticOptions(**options)})
        arguments = (own.model_dump_json(), str(result), variables, str(folder / "workers.log"))
        workers.append(_warm().Process(target=_work, args=arguments, daemon=True))
    run_to_end(workers, folder / "workers.log", may_fail=True)
    return TrainResult.model_validate_json(result.read_text("utf-8")) if result.exists() else None


def _work(text: str, result_path: str, variables: dict[str, str], log: str) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    with (
        Path(log).open("a", encoding="utf-8") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        try:
            job, heartbeat = Job.model_validate_json(text), Heartbeat()
            with patch.object(known_copies, "AWAITED_S", AWAITED_S):
                recovery = recover(job, heartbeat)
            if int(os.environ["RANK"]) >= job.plan.workers:
                await_end(recovery.store)
                return
            result = train_worker(job, heartbeat=heartbeat, recovery=recovery)
            if result is not None:
                Path(result_path).write_text(result.model_dump_json(), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
            raise


def fail_at(folder: Path, minibatch: int, hosts: int = 3) -> None:
    (folder / "fails-at").write_text(
        f"{minibatch} {minibatch // EVERY * EVERY} {hosts}", encoding="utf-8"
    )


def resumed(
    path: Path, plans: Sequence[Plan], points: Sequence[int], folder: Path
) -> list[tuple[int, float | None]]:
    """Return the losses of a run that is stopped at each of the points and resumed under the next
    plan.
    """
    found: list[tuple[int, float | None]] = []
    for plan, end in zip(plans, points, strict=True):
        checkpoints = CheckpointOptions(
            checkpoint_every=1000, checkpoint_folder=str(folder / "reference"), resume="auto"
        )
        job = Job(model=str(path), plan=plan, steps=end, seed=SEED, checkpoints=checkpoints)
        (result,) = run_jobs([job], folder)
        found += [(entry.minibatch, entry.loss) for entry in result.losses]
    return found


def losses(result: TrainResult) -> list[tuple[int, float | None]]:
    return [(entry.minibatch, entry.loss) for entry in result.losses]


def model_in(folder: Path, name: str, optimizer: str) -> Path:
    return write_model(folder, name, optimizer, more=DATASET.replace("SAMPLES", "100") + FAILS)


@pytest.mark.parametrize(
    ("name", "optimizer", "replicas", "fewer", "lost"),
    [
        pytest.param("language", "momentum", (1, 1, 1), (1, 1), 2, id="a lone stage"),
        pytest.param(
            "convolutional", "adamw", (2, 1), (1, 1), 0, id="buffers", marks=pytest.mark.slow
        ),
        pytest.param(
            "language", "adamw", (2, 1), (1, 1), 0, id="a replica is a copy", marks=pytest.mark.slow
        ),
        pytest.param(
            "language", "adamw", (1, 1, 1), (1,), 1, id="an idle host", marks=pytest.mark.slow
        ),
    ],
)
def test_a_host_is_lost_and_training_goes_on(
    name: str,
    optimizer: str,
    replicas: Sequence[int],
    fewer: Sequence[int],
    lost: int,
    tmp_path: Path,
) -> None:
    lose_one(name, optimizer, (replicas, fewer), lost, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_replicas_that_divide_their_state_lose_one(level: int, tmp_path: Path) -> None:
    lose_one("language", "adamw", ((3,), (2,)), 1, tmp_path, level)


def lose_one(
    name: str,
    optimizer: str,
    replicas: Sequence[Sequence[int]],
    lost: int,
    tmp_path: Path,
    level: int = 0,
) -> None:
    """Train on three hosts, lose one after the copy of minibatch 10, and go on under the other
    plan.
    """
    path = model_in(tmp_path, name, optimizer)
    costs = structural_profile(path, 4)
    whole, left = (make_plan(costs, each, "1f1b-flush", 6) for each in replicas)
    if level:
        whole, left = sharded(whole, level), sharded(left, level)
    fail_at(tmp_path, 13)
    assert start(job_of(path, whole), range(3), tmp_path) is None
    shutil.rmtree(tmp_path / f"memory-{lost}")
    result = start(job_of(path, left), [host for host in range(3) if host != lost], tmp_path)
    assert result is not None, (tmp_path / "workers.log").read_text("utf-8")
    assert result.first_minibatch == 10
    (event,) = result.restarts
    assert event.startswith("lost host ")
    assert f"training goes on from minibatch 10 with the plan {left.config}" in event
    assert losses(result) == resumed(path, (whole, left), (10, STEPS), tmp_path)


@pytest.mark.slow
def test_hosts_come_back_and_what_is_retrained_is_in_the_log_once(tmp_path: Path) -> None:
    """3 hosts, 2, 3 again with the returned one's old memory, and a failure before the first copy
    of a start.
    """
    path = model_in(tmp_path, "language", "momentum")
    costs = structural_profile(path, 4)
    plans = [make_plan(costs, (1,) * count, "1f1b-flush", 4) for count in (3, 2)]
    fail_at(tmp_path, 8)
    assert start(job_of(path, plans[0]), (0, 1, 2), tmp_path) is None
    fail_at(tmp_path, 19, hosts=2)
    # host 2 is away, with its memory of minibatch 5
    assert start(job_of(path, plans[1]), (0, 1), tmp_path) is None
    fail_at(tmp_path, 17)
    assert start(job_of(path, plans[0]), (0, 1, 2), tmp_path) is None
    result = start(job_of(path, plans[0]), (2, 0, 1), tmp_path)
    assert result is not None, (tmp_path / "workers.log").read_text("utf-8")
    assert [event.partition(" (")[0].partition(":")[0] for event in result.restarts] == [
        f"lost host {os.uname().nodename}",
        f"took in host {os.uname().nodename}",
        "the workers were started again",
    ]
    assert losses(result) == resumed(path, (plans[0], plans[1], plans[0]), (5, 15, STEPS), tmp_path)


@pytest.mark.slow
def test_a_host_alone_waits_for_those_with_the_rest_of_its_newest_copy_and_then_goes_on_without(
    tmp_path: Path,
) -> None:
    """What the memory of one host of three has of a copy is no state: it began anew at once."""
    path = model_in(tmp_path, "language", "momentum")
    costs = structural_profile(path, 4)
    whole, left = (make_plan(costs, (1,) * count, "1f1b-flush", 6) for count in (3, 1))
    fail_at(tmp_path, 13)
    assert start(job_of(path, whole), range(3), tmp_path) is None
    result = start(job_of(path, left), [0], tmp_path)
    assert result is not None, (tmp_path / "workers.log").read_text("utf-8")
    name = os.uname().nodename
    newer = f"the copy after minibatch 10, which hosts {name}, {name} had"
    waits = (
        f"{newer}, is newer than what this start can begin with (minibatch 0): it waits up "
        f"to 4 s for them"
    )
    assert waits in (tmp_path / "workers.log").read_text("utf-8")
    (event,) = result.restarts
    what = f"lost hosts {name}, {name}; {newer}, was waited for in vain"
    assert event.startswith(f"{what}: training goes on from minibatch 0 with the plan 1,")
    assert losses(result) == resumed(path, (left,), (STEPS,), tmp_path)


@pytest.mark.slow
def test_what_a_host_trained_alone_counts_no_more_when_others_come_with_a_newer_copy(
    tmp_path: Path,
) -> None:
    path = model_in(tmp_path, "language", "momentum")
    costs = structural_profile(path, 4)
    whole, left = (make_plan(costs, (1,) * count, "1f1b-flush", 6) for count in (3, 1))
    fail_at(tmp_path, 13)
    assert start(job_of(path, whole), range(3), tmp_path) is None
    fail_at(tmp_path, 8, hosts=1)
    # from minibatch 0 on, until after a copy
    assert start(job_of(path, left), [0], tmp_path) is None
    result = start(job_of(path, whole), (1, 0, 2), tmp_path)
    assert result is not None, (tmp_path / "workers.log").read_text("utf-8")
    (event,) = result.restarts
    assert (
        "; what was trained from minibatch 0 on since that copy counts no more: training goes on "
        "from" in event
    )
    assert result.first_minibatch == 10
    assert losses(result) == resumed(path, (whole, whole), (10, STEPS), tmp_path)


@pytest.mark.slow
def test_several_workers_on_a_host(tmp_path: Path) -> None:
    path = model_in(tmp_path, "language", "adamw")
    costs = structural_profile(path, 4)
    plans = [make_plan(costs, (1,) * count, "1f1b-flush", 4) for count in (4, 2)]
    fail_at(tmp_path, 13, hosts=2)
    assert start(job_of(path, plans[0]), (0, 1), tmp_path, per_host=2) is None
    shutil.rmtree(tmp_path / "memory-0")
    result = start(job_of(path, plans[1]), (1,), tmp_path, per_host=2)
    assert result is not None
    assert losses(result) == resumed(path, plans, (10, STEPS), tmp_path)


def test_memory_without_room_is_one_sentence(tmp_path: Path) -> None:
    path = model_in(tmp_path, "language", "momentum")
    (tmp_path / "memory-0").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path / "memory-0")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        assert (
            start(job_of(path, make_plan(structural_profile(path, 4), (1,))), (0,), tmp_path)
            is None
        )
    finally:
        subprocess.run(["umount", str(tmp_path / "memory-0")], check=True)
    told = (tmp_path / "workers.log").read_text("utf-8")
    assert re.search(
        r"InputError: copies of the state take \S+ kB of '\S+' on host 0, which has \S+ kB left",
        told,
    ), told


def test_a_host_that_comes_leaves_it_to_worker_0_whether_checkpoints_are_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CheckpointOptions(checkpoint_every=5, checkpoint_folder=str(tmp_path))
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "index.json").touch()
    monkeypatch.delenv("RANK", raising=False)
    for rank, resumes in ((None, True), ("1", True), ("0", False)):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        assert (after_torchrun_restart(options, elastic=True) is not None) == resumes
    assert after_torchrun_restart(options, elastic=False) is None


def test_what_cannot_be_survived_is_refused() -> None:
    layers = [layer(name, 1, 2, output_bytes=100, weight_bytes=1000) for name in "abcdef"]
    cluster = planner.hierarchical_cluster((2, 3), (1e5, 1e3))
    plan = planner.solve(profile(*layers), cluster, schedule="1f1b-flush", survive=1)
    check_elastic(plan, ElasticOptions(elastic="2:3", rendezvous="host0:29500"))
    with pytest.raises(
        PlanError, match="a run that may have 2 GPUs needs a plan for them, and there is none"
    ):
        check_elastic(plan, ElasticOptions(elastic="1:3", rendezvous="host0:29500"))
    with pytest.raises(PlanError, match="6 GPUs of the plan do not split evenly over 4 hosts"):
        check_elastic(plan, ElasticOptions(elastic="3:4", rendezvous="host0:29500"))
    with pytest.raises(InputError, match="hosts do not find each other at `rendezvous=None`"):
        check_elastic(plan, ElasticOptions(elastic="2:3"))
    with pytest.raises(InputError, match="'4:2' are no numbers of hosts"):
        ElasticOptions(elastic="4:2")


@pytest.mark.slow
def test_asynchronous_schedules_drain_at_copies(tmp_path: Path) -> None:
    path = model_in(tmp_path, "language", "momentum")
    plan = make_plan(structural_profile(path, 4), (1, 1, 1))
    fail_at(tmp_path, 13)
    assert start(job_of(path, plan), (0, 1, 2), tmp_path) is None
    shutil.rmtree(tmp_path / "memory-1")
    result = start(job_of(path, plan), (0, 1, 2), tmp_path)
    assert result is not None
    checkpoints = CheckpointOptions(
        checkpoint_every=EVERY, checkpoint_folder=str(tmp_path / "reference")
    )
    job = Job(model=str(path), plan=plan, steps=STEPS, seed=SEED, checkpoints=checkpoints)
    assert losses(result) == losses(run_jobs([job], tmp_path)[0])
