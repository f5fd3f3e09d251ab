"""Let faults happen to hosts in network namespaces while they train, and check what the run makes of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import planner
from benchmarks.elastic.model import BACKWARD_S, FORWARD_S, Block
from benchmarks.netns import INTERFACE, Host, network
from planner.formats.plan import Plan

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).with_name("model.py")
EVERY = 10  # minibatches between copies
HANG_TIMEOUT_S = 8.0
MICROBATCHES, BATCH_SIZE = 4, 4
PORT = 29533
AWAY_S = 4.0  # for which a lost host, or a link, stays away
KINDS = ("worker killed", "worker stopped", "host lost", "link down")
GIVE_UP_S = 240.0  # for one recovery, on a machine that is also otherwise busy


@dataclass
class Fault:
    """What happened to a host, and how long the run took to go on."""

    kind: str
    host: int
    minibatch: int  # the newest that was trained before it
    workers: int
    began_s: float | None = None  # from the fault until the process began that trained first after it
    went_on_s: float | None = None  # until the first update
    repeated: int | None = None  # minibatches that were trained again


@dataclass
class Outcome:
    """A run with all its faults."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # broken promises
    start_s: float = 0.0  # from the first process to the first update
    speeds: list[tuple[int, float, float]] = field(default_factory=list)  # workers, predicted and measured s/minibatch


def write_plan(hosts: int, per_host: int, folder: Path) -> Path:
    """Write a plan of lone stages, with those for every smaller number of hosts."""
    profile = planner.estimate(MODEL, device="cpu", batch_size=BATCH_SIZE)
    times = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S}
    layers = [each.model_copy(update=times) if each.op == Block.__name__ else each for each in profile.layers]
    profile = profile.model_copy(update={"layers": tuple(layers)})
    plans = []
    for workers in range(hosts * per_host, 0, -per_host):
        cluster = planner.flat_cluster(workers, "10Gbps")
        plans.append(planner.price(profile, cluster, workers, schedule="1f1b-flush", microbatches=MICROBATCHES))
    path = folder / "plan.json"
    plans[0].model_copy(update={"smaller": tuple(plans[1:])}).save(path)
    return path


def reference(plan: Plan, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return the losses of a run on one host without faults; lone stages compute the same bits however they are cut."""
    least = plan.smaller[-1]
    least.save(folder / "alone.json")
    command = [sys.executable, "-m", "planner", "train", str(MODEL), "--plan", "alone.json", "--steps", str(steps)]
    at_once = {**_environment(), "ELASTIC_AT_ONCE": "1"}
    done = subprocess.run([*command, "--json"], cwd=folder, env=at_once, capture_output=True, check=True)
    (folder / "updates").unlink()
    found: list[dict[str, Any]] = json.loads(done.stdout)["losses"]
    return found


class Cluster:
    """Hosts that train, each with a `plan train --elastic` of its own."""

    def __init__(self, hosts: Sequence[Host], folder: Path, steps: int, more: Sequence[str] = ()) -> None:
        self._hosts, self.folder = hosts, folder
        self._command = [
            *(sys.executable, "-m", "planner", "train", str(MODEL), "--plan", "plan.json", "--steps", str(steps)),
            *("--json", "--elastic", f"1:{len(hosts)}", "--rendezvous", f"{hosts[0].address}:{PORT}"),
            *("--hang-timeout", str(HANG_TIMEOUT_S), "--copy-every", str(EVERY), *more),
        ]
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def memory(self, host: int) -> Path:
        return Path("/dev/shm") / f"{self.folder.name}-{host}"

    def start(self, host: int) -> None:
        command = [*self._command, "--copy-folder", str(self.memory(host))]
        with (self.folder / f"out-{host}").open("a") as out, (self.folder / f"err-{host}").open("a") as err:
            options = {"env": _environment(), "cwd": self.folder, "stdout": out, "stderr": err}
            self.processes[host] = self._hosts[host].popen(command, **options)

    def workers(self, host: int) -> list[int]:
        found, pid = [], self.processes[host].pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(OSError):
                    if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                        found.append(int(child))
        return found

    def lose(self, host: int) -> None:
        self.processes[host].kill()  # its workers die with it
        self.processes[host].wait()
        shutil.rmtree(self.memory(host), ignore_errors=True)

    def link(self, host: int, state: str) -> None:
        command = ["ip", "-n", self._hosts[host].name, "link", "set", INTERFACE, state]
        subprocess.run(command, check=True)

    def updates(self) -> list[tuple[float, float, int, int]]:
        """Return of each update when its process began and it was, which it was, and on how many workers."""
        with suppress(OSError):
            lines = (self.folder / "updates").read_text(encoding="utf-8").splitlines()
            return [tuple(json.loads(line)) for line in lines if line.endswith("]")]
        return []

    @property
    def ended(self) -> bool:
        return self.processes[0].poll() is not None


@contextmanager
def cluster(hosts: int, per_host: int, steps: int, folder: Path, more: Sequence[str] = ()) -> Iterator[Cluster]:
    """Yield hosts that have begun to train."""
    with network(hosts) as made:
        found = Cluster(made, folder, steps, more)
        try:
            for host in range(hosts):
                found.start(host)
            yield found
        finally:
            for process in found.processes.values():
                process.kill()
                process.wait()
            for host in range(hosts):
                shutil.rmtree(found.memory(host), ignore_errors=True)


def run(hosts: int, per_host: int, faults: int, steps: int, draw: random.Random) -> Outcome:
    """Train with so many faults, and compare the losses with a run without any.

    Host 0, which has the store where hosts meet, keeps its agent and its link; its workers fail as any others.
    """
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        plan = planner.load_plan(write_plan(hosts, per_host, folder))
        expected = reference(plan, steps, folder)
        with cluster(hosts, per_host, steps, folder) as found:
            _await(found, 0, time.time())
            first = found.updates()[0]
            outcome.start_s = first[1] - first[0]
            for _ in range(faults):
                if not _hit(found, hosts, draw, outcome):
                    break
            deadline = time.monotonic() + GIVE_UP_S
            while not found.ended and time.monotonic() < deadline:
                time.sleep(0.1)
            _check(found, expected, outcome)
            outcome.speeds = _speeds(found, plan)
    return outcome


def _speeds(found: Cluster, plan: Plan) -> list[tuple[int, float, float]]:
    """Return the predicted and the median measured seconds per minibatch of each plan that trained for a while."""
    predicted = {each.workers: each.predicted.seconds_per_minibatch for each in (plan, *plan.smaller)}
    steps: dict[int, list[float]] = {}
    for before, after in pairwise(found.updates()):
        if before[0] == after[0]:  # of one start
            steps.setdefault(after[3], []).append(after[1] - before[1])
    whole = {workers: own for workers, own in sorted(steps.items()) if len(own) >= 2 * EVERY}
    return [(workers, predicted[workers], statistics.median(own)) for workers, own in whole.items()]


def _await(found: Cluster, known: int, since_s: float) -> tuple[float, float, int, int] | None:
    """Return the first update by a process that began after a moment; None when the run ends before, or hangs."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline and not found.ended:
        for update in found.updates()[known:]:
            if update[0] > since_s or known == 0:
                return update
        time.sleep(0.02)
    return None


def _hit(found: Cluster, hosts: int, draw: random.Random, outcome: Outcome) -> bool:
    """Let one fault happen, and wait until the run goes on; return False when it has ended."""
    kind = draw.choice(KINDS)
    host = draw.randrange(0 if kind.startswith("worker") else 1, hosts)
    time.sleep(draw.uniform(0.2, 2.5))
    if found.ended or not (workers := found.workers(host)):
        return not found.ended
    known, at_s = len(found.updates()), time.time()
    newest = found.updates()[-1][2]
    fault = Fault(kind, host, newest, sum(len(found.workers(each)) for each in range(hosts)))
    if kind.startswith("worker"):
        with suppress(ProcessLookupError):
            os.kill(draw.choice(workers), signal.SIGKILL if kind == "worker killed" else signal.SIGSTOP)
    elif kind == "host lost":
        found.lose(host)
    else:
        found.link(host, "down")
    update = _await(found, known, at_s)
    if update is None:
        if not found.ended:
            outcome.problems.append(f"{kind} on host {host} after minibatch {newest}: the run did not go on")
        return False
    fault.began_s, fault.went_on_s = update[0] - at_s, update[1] - at_s
    trained = [each[2] for each in found.updates()[known:] if each[0] <= at_s]
    fault.repeated = max([newest, *trained]) - update[2] + 1
    outcome.faults.append(fault)
    if kind in ("host lost", "link down"):
        time.sleep(AWAY_S)
        known, at_s = len(found.updates()), time.time()
        if kind == "host lost":
            found.start(host)
        else:
            found.link(host, "up")
        if draw.random() < 0.5:  # otherwise the next fault may come while it is taken in
            _await(found, known, at_s)
    return True


def _check(found: Cluster, expected: Sequence[dict[str, Any]], outcome: Outcome) -> None:
    texts = [(found.folder / f"out-{host}").read_text(encoding="utf-8") for host in found.processes]
    results = [json.loads(text) for text in texts if text]
    if len(results) != 1:
        tail = "".join((found.folder / f"err-{host}").read_text("utf-8")[-1500:] for host in found.processes)
        outcome.problems.append(f"{len(results)} results instead of one\n{tail}")
        return
    losses = results[0]["losses"]
    if [each["minibatch"] for each in losses] != list(range(len(expected))):
        outcome.problems.append("minibatches are missing in the losses, or there twice")
    elif losses != expected:
        differs = next(a["minibatch"] for a, b in zip(losses, expected, strict=True) if a != b)
        outcome.problems.append(f"losses differ from minibatch {differs} on")
    for fault in outcome.faults:
        if fault.repeated is not None and fault.repeated > 2 * EVERY:
            outcome.problems.append(f"{fault.kind}: {fault.repeated} minibatches were trained again")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
