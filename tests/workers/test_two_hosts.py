"""Two hosts, each a network namespace with a torchrun of its own: they train as one does, and end
together.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.netns import INTERFACE, Host, NetworkUnavailableError, network
from planner.formats.plan import load_plan, save_plan
from tests.executor.models import DATASET, write_model
from tests.executor.plans import make_plan, scattered, structural_profile

TIMEOUT_S = 240
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
PORT, NAME = 29511, "first-host"
HANG_TIMEOUT_S = 6
ENDS_WITHIN_S = 90  # torchrun's own patience included; on a machine that does much else

# Tells the test that training goes on.
HOOK = """
def on_update(minibatch, loss, metrics):
    with open("progress", "w") as file:
        file.write(str(minibatch))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model file and a plan "1-1" for it."""
    path = write_model(
        tmp_path, "language", "momentum", more=DATASET.replace("SAMPLES", "40") + HOOK
    )
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), tmp_path / "plan.json")
    return tmp_path


def arguments(*more: str) -> list[str]:
    return ["train", "language_momentum.py", "--plan", "plan.json", "--seed", "3", "--json", *more]


# of worker 0's address, and a host's number and own address
Launcher = Callable[[str, int, str], list[str]]


def static(address: str, index: int, _: str) -> list[str]:
    """Return torchrun's command with ranks that the user gives."""
    return [*TORCHRUN, f"--node-rank={index}", f"--master-addr={address}", f"--master-port={PORT}"]


def c10d(address: str, index: int, own: str) -> list[str]:
    """Return torchrun's command with hosts that find each other, and two restarts."""
    found = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{PORT}", f"--local-addr={own}"]
    # torchrun tells by the host's name, which is the same here
    found += [f"--rdzv-conf=is_host={index == 0}"]
    return [*TORCHRUN, *found, "--max-restarts=2"]


def bare(address: str, index: int, _: str) -> list[str]:
    """Return a command as mpirun or an operator runs it: nothing but these variables, and
    no store.
    """
    variables = [f"RANK={index}", "WORLD_SIZE=2", f"MASTER_ADDR={address}", f"MASTER_PORT={PORT}"]
    return ["env", *variables, sys.executable]


@contextmanager
def two_hosts(
    folder: Path, *more: str, launcher: Launcher = static, interface: str | None = INTERFACE
) -> Iterator[tuple[tuple[Host, ...], list[subprocess.Popen[str]]]]:
    """`plan train` on two hosts; whatever still runs there at the end is killed with them."""
    try:
        with network(2) as hosts, named(hosts):
            own = () if interface is None else ("--interface", interface)
            address = NAME if interface is None else hosts[0].address
            commands = [launcher(address, index, host.address) for index, host in enumerate(hosts)]
            processes = [
                _start(folder, hosts, index, command, (*more, *own))
                for index, command in enumerate(commands)
            ]
            try:
                yield hosts, processes
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")


@contextmanager
def named(hosts: Sequence[Host]) -> Iterator[None]:
    """Name the first host as Debian does: for itself its name is 127.0.1.1, and so is each host's
    own name.
    """
    folders = [Path("/etc/netns") / host.name for host in hosts]
    for folder, address in zip(folders, ("127.0.1.1", hosts[0].address), strict=True):
        folder.mkdir(parents=True)
        own = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
        (folder / "hosts").write_text(f"{own}{address} {NAME}\n", encoding="utf-8")
    try:
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def _start(
    folder: Path, hosts: Sequence[Host], index: int, launcher: Sequence[str], more: Sequence[str]
) -> subprocess.Popen[str]:
    command = ["env", "-u", "GLOO_SOCKET_IFNAME", *launcher, "-m", "planner", *arguments(*more)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with (folder / f"out-{index}").open("w") as out, (folder / f"err-{index}").open("w") as err:
        return hosts[index].popen(command, env=environment, cwd=folder, stdout=out, stderr=err)


def await_training(folder: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "progress").exists():
        assert time.monotonic() < deadline, "the workers did not start"
        assert all(process.poll() is None for process in processes), (folder / "err-0").read_text()
        time.sleep(0.1)
    time.sleep(HANG_TIMEOUT_S / 2)  # until the workers' pages have told of it


def ended(processes: Sequence[subprocess.Popen[str]]) -> None:
    """They end in time, as failures."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    for process in processes:
        assert process.wait(timeout=max(1, deadline - time.monotonic())) != 0


def error_of(folder: Path, index: int) -> str:
    """What a host tells."""
    lines = (folder / f"err-{index}").read_text().splitlines()
    return next((line for line in lines if line.startswith("error: ")), "")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the workers of a torchrun."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # which has ended by now
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
    return found


@pytest.mark.slow
def test_two_hosts_train_as_one_does(folder: Path) -> None:
    # The first stage is on the second host, as where pipelines stand in servers: any rank may run
    # any stage.
    save_plan(scattered(load_plan(folder / "plan.json")), folder / "plan.json")
    with two_hosts(folder, "--epochs", "2", "--save-weights", "two.pt") as (_, processes):
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    assert codes == [0, 0], (folder / "err-0").read_text() + (folder / "err-1").read_text()
    alone = subprocess.run(
        [sys.executable, "-m", "planner", *arguments("--epochs", "2", "--save-weights", "one.pt")],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    result = result_of(folder)
    assert result["losses"] == json.loads(alone.stdout)["losses"]
    one, two = (torch.load(folder / name, weights_only=True) for name in ("one.pt", "two.pt"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_a_worker_killed_on_the_second_host_ends_both(folder: Path) -> None:
    with two_hosts(folder, "--epochs", "100000", "--hang-timeout", str(HANG_TIMEOUT_S)) as (
        hosts,
        processes,
    ):
        await_training(folder, processes)
        (worker,) = workers_of(processes[1])
        os.kill(worker, signal.SIGKILL)
        ended(processes)
        assert_nothing_left(hosts)
        assert re.match(
            r"error: worker 1 \(stage 1\): its process is gone .* minibatch \d+",
            error_of(folder, 0),
        )


@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_hosts(folder: Path) -> None:
    with two_hosts(folder, "--epochs", "100000", "--hang-timeout", str(HANG_TIMEOUT_S)) as (
        hosts,
        processes,
    ):
        await_training(folder, processes)
        subprocess.run(["ip", "-n", hosts[1].name, "link", "set", INTERFACE, "down"], check=True)
        ended(processes)
        assert_nothing_left(hosts)
        place = r"error: worker 1 \(stage 1\).* minibatch \d+.*"
        assert re.match(place + "its host or its link is down", error_of(folder, 0)), error_of(
            folder, 0
        )
        assert re.match(place + "lost torchrun's store", error_of(folder, 1)), error_of(folder, 1)


def assert_nothing_left(hosts: Sequence[Host]) -> None:
    """No process runs on them."""
    for host in hosts:
        left = subprocess.run(
            ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True
        )
        assert left.stdout == ""


def result_of(folder: Path) -> dict[str, Any]:
    """What worker 0 printed, on whichever host it is."""
    (result,) = (
        json.loads(text)
        for text in ((folder / f"out-{i}").read_text() for i in range(2))
        if text.strip()
    )
    return cast("dict[str, Any]", result)


def both_errors(folder: Path) -> str:
    return (folder / "err-0").read_text() + (folder / "err-1").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["first run", "resume"])
def test_hosts_that_count_their_restarts_apart_start_again_together(
    folder: Path, resume: tuple[str, ...]
) -> None:
    """Only the agent whose worker was killed counts a restart under c10d; the other one has seen no
    failure.
    """
    options = ("--steps", "400", "--checkpoint-every", "10", *resume)
    done = 0
    with two_hosts(folder, *options, launcher=c10d) as (_, processes):
        for index in range(2):  # first a worker of one host, then one of the other
            done = await_checkpoint(folder, processes, done + 1)
            (worker,) = workers_of(processes[index])
            os.kill(worker, signal.SIGKILL)
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    assert codes == [0, 0], both_errors(folder)
    result = result_of(folder)
    assert result["first_minibatch"] >= done
    assert [loss["minibatch"] for loss in result["losses"]] == list(range(400))


def await_checkpoint(folder: Path, processes: Sequence[subprocess.Popen[str]], least: int) -> int:
    """Wait for a checkpoint after `least` minibatches or more; return after how many it was."""
    deadline = time.monotonic() + TIMEOUT_S
    while (
        not (found := [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")])
        or max(found) < least
    ):
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert all(process.poll() is None for process in processes), both_errors(folder)
        time.sleep(0.1)
    return max(found)


def assert_ten_minibatches_train(folder: Path, **how: Any) -> None:
    with two_hosts(folder, "--steps", "10", **how) as (_, processes):
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    assert codes == [0, 0], both_errors(folder)
    assert len(result_of(folder)["losses"]) == 10


@pytest.mark.slow
def test_workers_that_only_know_their_ranks_and_worker_0s_address_train(folder: Path) -> None:
    assert_ten_minibatches_train(folder, launcher=bare)


@pytest.mark.slow
def test_a_worker_that_only_knows_its_rank_reports_why_another_one_ended(folder: Path) -> None:
    options = ("--epochs", "100000", "--hang-timeout", str(HANG_TIMEOUT_S))
    with two_hosts(folder, *options, launcher=bare) as (_, processes):
        await_training(folder, processes)
        processes[1].kill()
        assert processes[0].wait(timeout=ENDS_WITHIN_S) == 1
        assert re.match(
            r"error: worker 1 \(stage 1\): its process is gone .* minibatch \d+",
            error_of(folder, 0),
        )


@pytest.mark.slow
def test_hosts_whose_own_names_lead_to_themselves_reach_each_other(folder: Path) -> None:
    assert_ten_minibatches_train(folder, interface=None)
