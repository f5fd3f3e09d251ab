"""Another user of the machine, and whoever reaches a port: neither runs code in a run, nor ends it
with a word of his.

Today's attacks, by a process of the user "nobody": on the store of a run on one host, and on the
one where hosts meet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.netns import NetworkUnavailableError, network
from planner.formats.plan import load_plan, save_plan
from tests.executor.models import DATASET, write_model
from tests.executor.plans import make_plan, structural_profile
from tests.workers.intruder import NOBODY, intrude

TIMEOUT_S = 180
STEPS = 60
FORGED = "was written by nobody who belongs to the run"
# Trains slowly enough to be met, and tells how far it is.
SLOWLY = """
import time

def on_update(minibatch, loss, metrics):
    with open("progress", "w") as file:
        file.write(str(minibatch))
    time.sleep(0.2)
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model file that trains slowly, and a plan "1-1" for it."""
    path = write_model(
        tmp_path, "language", "momentum", more=DATASET.replace("SAMPLES", "40") + SLOWLY
    )
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), tmp_path / "plan.json")
    return tmp_path


@pytest.fixture
def marker() -> Iterator[Path]:
    """A file that everybody may write, and that code of the intruder would."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name) / "marker"


def command(*more: str) -> list[str]:
    model = [
        sys.executable,
        "-m",
        "planner",
        "train",
        "language_momentum.py",
        "--plan",
        "plan.json",
    ]
    return [*model, "--seed", "3", "--json", "--steps", str(STEPS), *more]


@contextmanager
def training(
    folder: Path, *more: str, launcher: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`plan train`, which is ended with its workers in the end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path.cwd()),
        "HOME": str(folder),
    }
    pipe = subprocess.PIPE
    started = [*launcher, *command(*more)]
    process = subprocess.Popen(
        started, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
        process.kill()
        process.communicate()


def listening(process: subprocess.Popen[str]) -> list[tuple[str, int]]:
    """Return the IPv4 and IPv6 addresses and ports that a process listens at; IPv6 as it stands in
    /proc.
    """
    inodes = set()
    with suppress(OSError):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                short = (
                    socket.inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else address
                )
                places.append((short, int(port, 16)))
    return places


def await_port(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Return where the launcher's store listens, once it does."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (places := listening(process)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no store was opened"
        time.sleep(0.1)
    assert len(places) == 1
    return places[0]


def await_training(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "progress").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.1)
    time.sleep(1.0)  # until the workers' pages are in the store


def test_another_user_cannot_report_a_failure(folder: Path) -> None:
    """He ended a run with exit code 0, and with a text of his that commanded the terminal."""
    with training(folder) as process:
        address, port = await_port(process)
        await_training(process, folder)
        assert intrude(address, port, "end")[0] == f"{NOBODY} did end"
        answer, complaints = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, complaints
    assert json.loads(answer)["minibatches"] == STEPS
    assert "all is well" not in complaints
    assert address == "127.0.0.1"


def test_a_run_whose_store_was_written_over_fails_and_says_so(folder: Path) -> None:
    """Who reaches the store can end a run, but neither with success nor with words of his own."""
    with training(folder, "--steps", str(10 * STEPS)) as process:  # it ends before
        address, port = await_port(process)
        await_training(process, folder)
        assert intrude(address, port, "overwrite")[0] == f"{NOBODY} did overwrite"
        answer, complaints = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, complaints
    assert FORGED in json.loads(answer)["error"]
    assert "all is well" not in complaints + answer
    assert "\x1b" not in complaints + answer


def run_id(folder: Path) -> str:
    """Return the id of an elastic run, which everybody who knows the model can guess."""
    return f"{str(load_plan(folder / 'plan.json').graph_hash)[:16]}-3"


def test_another_user_cannot_run_code_where_hosts_meet(folder: Path, marker: Path) -> None:
    """The agent of a host unpickled what stood under a key that could be guessed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    with training(folder, "--elastic", "2:2", "--rendezvous", place) as process:
        address, port = await_port(process)
        time.sleep(3.0)  # until the agent has joined, and looks for others once a second
        assert (
            intrude("127.0.0.1", port, "run_code", run_id(folder), str(marker))[0]
            == f"{NOBODY} did run_code"
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        assert not marker.exists(), marker.read_text()
        assert address == "127.0.0.1"
        answer, complaints = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, complaints
    assert FORGED in json.loads(answer)["error"]


def test_who_reaches_the_port_cannot_run_code_where_hosts_meet(folder: Path, marker: Path) -> None:
    """From another host; and the store listens on the address that was named, and on no other."""
    try:
        with network(2) as hosts:
            place = f"{hosts[0].address}:29544"
            launcher = hosts[0].command(())
            with training(
                folder, "--elastic", "2:2", "--rendezvous", place, launcher=launcher
            ) as process:
                address, port = await_port(process)
                time.sleep(3.0)
                arguments = ("run_code", run_id(folder), str(marker))
                answer = intrude(hosts[0].address, port, *arguments, launcher=hosts[1].command(()))
                assert answer[0] == f"{NOBODY} did run_code"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                assert not marker.exists(), marker.read_text()
                assert address == hosts[0].address
                assert process.wait(timeout=TIMEOUT_S) == 1
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
