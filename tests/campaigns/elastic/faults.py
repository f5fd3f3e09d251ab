"""Let faults happen to hosts in network namespaces while they train, and check what the run makes
of them.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import planner
from benchmarks.netns import INTERFACE, Host, network
from planner.formats.cluster import Level
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.profiler.links.measure_cluster import measure_host
from planner.workers.place import available_cores
from tests.campaigns.elastic.hook.sitecustomize import IMPORTS, START, STRUCK
from tests.campaigns.elastic.model import BACKWARD_S, FORWARD_S, Block

ROOT = Path(__file__).parents[3]
MODEL, HOOK = Path(__file__).with_name("model.py"), Path(__file__).with_name("hook")
EVERY = 10  # minibatches between copies
EVALUATE_EVERY, CHECKPOINT_EVERY = 15, 35
HANG_TIMEOUT_S = 8.0
MICROBATCHES, BATCH_SIZE = 4, 4
PORT = 29533
AWAY_S = (6.0, 30.0)  # for which a lost host, or a link, stays away, at least and at most
KILLED, STOPPED, LOST, UNPLUGGED = KINDS = (
    "worker killed",
    "worker stopped",
    "host lost",
    "link down",
)
BRIEFLY = "link down for a moment"  # and up again before a worker noticed
_ACTS = {KILLED: "kill", STOPPED: "stop", LOST: "hold", UNPLUGGED: "hold"}
PHASES = (
    "forward",
    "backward",
    "message",
    "all-reduce",
    "update",
    "evaluation",
    "checkpoint",
    "copy",
)
# from the begin of a phase to the fault, at most; at once in others
AFTER_S = {IMPORTS: 3.0, "copy": 0.03}
# a worker that is to be hit comes to the phase; or else it is hit where it is
STRIKE_WITHIN_S = 8.0
RECOVERED_S = 60.0  # the same in a start after another fault; or else it is not hit
TAKEN_IN_S = 40.0
PAUSE_S = 2.0  # between two looks, 20 ms apart
GIVE_UP_S = 240.0  # for one recovery, on a machine that is also otherwise busy
_OFTEN = ("--evaluate-every", str(EVALUATE_EVERY))
_WENT_ON = re.compile(r"training goes on from minibatch (\d+) with the plan ([^ ,]+),")


@dataclass
class Fault:
    """What happened to a host, and how long the run took to go on; times are None where another
    fault came before.
    """

    kind: str
    phase: str  # of the worker that was hit
    host: int
    minibatch: int  # the newest that was trained before it
    workers: int
    noticed_s: float | None = None  # from the fault until a worker that failed said so
    began_s: float | None = None  # until the process began that trained first after it
    imported_s: float | None = None  # until that had imported what it needs
    went_on_s: float | None = None  # until the first update
    repeated: int | None = None  # minibatches that were trained again
    second: bool = False  # during the recovery from the fault before
    # this process did not run for seconds: other work had the machine, and times say nothing
    paused: bool = False


@dataclass
class Outcome:
    """A run with all its faults."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # broken promises
    start_s: float = 0.0  # from the first process to the first update
    # plan, predicted and measured s/minibatch
    speeds: list[tuple[str, float, float]] = field(default_factory=list)
    whole_s: float = 0.0  # from the first update to the last one
    # from the last update before each start to its first one
    stood_s: list[float] = field(default_factory=list)


class Update(NamedTuple):
    """An update, as the model's file tells of it."""

    began_s: float  # when its process began, since the epoch
    imported_s: float
    at_s: float
    minibatch: int
    workers: int


class Measured(NamedTuple):
    """What predictions are made from: the times of layers, those of computations included, and a
    link.
    """

    profile: Profile
    link: Level


def measure(workers: int) -> Measured:
    """Measure the model, while other workers use the other cores, and the messages of two
    workers.
    """
    processes = min(workers, available_cores())
    profile = planner.profile(MODEL, batch_size=BATCH_SIZE, device="cpu", processes=processes)
    return Measured(profile, measure_host(2, "cpu").levels[0])


def write_plan(
    hosts: int,
    per_host: int,
    folder: Path,
    *,
    replicated: bool = False,
    measured: Measured | None = None,
) -> Plan:
    """Write a plan of lone stages, or of stages with two replicas, with those for every smaller
    number of hosts.

    If nothing was measured, layers take the time that they sleep.
    """
    link: dict[str, Any] = {}
    if measured is not None:
        profile, link = measured.profile, measured.link.model_dump()
    else:
        profile = planner.estimate(MODEL, device="cpu", batch_size=BATCH_SIZE)
        times = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S}
        layers = [
            each.model_copy(update=times) if each.op == Block.__name__ else each
            for each in profile.layers
        ]
        profile = profile.model_copy(update={"layers": tuple(layers)})
    plans = []
    for workers in range(hosts * per_host, 0, -per_host):
        replicas = [2] * (workers // 2) + [1] * (workers % 2) if replicated else [1] * workers
        how: dict[str, Any] = {
            "schedule": "1f1b-flush",
            "microbatches": MICROBATCHES,
            "replicas": replicas,
        }
        cluster = planner.flat_cluster(workers, "10Gbps")
        level = cluster.levels[0].model_copy(update=link | {"size": workers})
        plans.append(
            planner.price(
                profile, cluster.model_copy(update={"levels": (level,)}), len(replicas), **how
            )
        )
    plan = plans[0].model_copy(update={"smaller": tuple(plans[1:])})
    plan.save(folder / "plan.json")
    return plan


def reference(plan: Plan, restarts: Sequence[str], steps: int, folder: Path) -> dict[str, Any]:
    """Return losses and evaluations of a run that is stopped and resumed where the other one
    changed its plan.
    """
    plans = {each.config: each for each in (plan, *plan.smaller)}
    begun = [(0, plan.config)]
    for restart in restarts:
        found = _WENT_ON.search(restart)
        assert found is not None, restart
        first = int(found[1])
        while begun and begun[-1][0] >= first:  # nothing is left of what that start trained
            begun.pop()
        begun.append((first, found[2]))
    losses, evaluations = list[Any](), list[Any]()
    command = [
        sys.executable,
        "-m",
        "planner",
        "train",
        str(MODEL),
        "--plan",
        "part.json",
        "--json",
        *_OFTEN,
    ]
    command += [
        "--checkpoint-every",
        str(10 * steps),
        "--checkpoint-folder",
        "reference",
        "--resume",
        "auto",
    ]
    ends = [first for first, _ in begun[1:]] + [steps]
    for (_, config), end in zip(begun, ends, strict=True):
        plans[config].model_copy(update={"smaller": ()}).save(folder / "part.json")
        at_once = {**_environment(), "ELASTIC_AT_ONCE": "1"}
        whole = [*command, "--steps", str(end)]
        done = subprocess.run(
            whole, cwd=folder, env=at_once, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the reference under {config} until {end} failed: {done.stderr}")
        part = json.loads(done.stdout)
        losses += part["losses"]
        evaluations += part["evaluations"]
    return {"losses": losses, "evaluations": evaluations}


class Cluster:
    """Hosts that train, each with a `plan train --elastic` of its own."""

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        steps: int,
        more: Sequence[str] = (),
        port: int = PORT,
    ) -> None:
        self._hosts, self.folder, self._port = hosts, folder, port
        self._command = [
            *(
                sys.executable,
                "-m",
                "planner",
                "train",
                str(MODEL),
                "--plan",
                "plan.json",
                "--steps",
                str(steps),
            ),
            *(
                "--json",
                "--elastic",
                f"1:{len(hosts)}",
                "--hang-timeout",
                str(HANG_TIMEOUT_S),
                *more,
            ),
        ]
        self.meets_at = 0  # the host that has the store
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def memory(self, host: int) -> Path:
        return Path("/dev/shm") / f"{self.folder.name}-{host}"

    def start(self, host: int) -> None:
        command = [*self._command, "--copy-folder", str(self.memory(host))]
        command += ["--rendezvous", f"{self._hosts[self.meets_at].address}:{self._port}"]
        environment = {**_environment(HOOK), "ELASTIC_HOST": str(host)}
        with (
            (self.folder / f"out-{host}").open("a") as out,
            (self.folder / f"err-{host}").open("a") as err,
        ):
            options = {"env": environment, "cwd": self.folder, "stdout": out, "stderr": err}
            self.processes[host] = self._hosts[host].popen(command, **options)

    def workers(self, host: int) -> dict[int, int]:
        """Return the processes of a host's workers, by their local ranks."""
        found, pid = {}, self.processes[host].pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(OSError):
                    variables = Path(f"/proc/{child}/environ").read_bytes()
                    if (rank := re.search(rb"\0LOCAL_RANK=(\d+)", variables)) is not None:
                        found[int(rank[1])] = int(child)
        return found

    def lose(self, host: int) -> None:
        self.processes[host].kill()  # its workers die with it
        self.processes[host].wait()
        shutil.rmtree(self.memory(host), ignore_errors=True)

    def link(self, host: int, state: str) -> None:
        command = ["ip", "-n", self._hosts[host].name, "link", "set", INTERFACE, state]
        subprocess.run(command, check=True)

    def updates(self) -> list[Update]:
        with suppress(OSError):
            lines = (self.folder / "updates").read_text(encoding="utf-8").splitlines()
            return [Update(*json.loads(line)) for line in lines if line.endswith("]")]
        return []

    def noticed_s(self, since_s: float) -> float | None:
        """Return when a worker first said why it ended, after a moment, if one has."""
        times = []
        for host in self.processes:
            for path in self.memory(host).glob("*/fault.json"):
                with suppress(OSError, ValueError):
                    times.append(float(json.loads(path.read_text(encoding="utf-8"))["at_s"]))
        return min((at_s for at_s in times if at_s > since_s), default=None)

    def all_is_copied(self) -> bool:
        """Return whether this start has made a whole copy, so that each state is in the memory of
        two hosts.
        """
        updates = self.updates()
        first = min(each.minibatch for each in updates if each.began_s == updates[-1].began_s)
        # A copy is waited for before the next one is begun.
        return updates[-1].minibatch > (first // EVERY + 2) * EVERY

    @property
    def ended(self) -> bool:
        return self.processes[0].poll() is not None


@contextmanager
def cluster(hosts: int, steps: int, folder: Path, more: Sequence[str] = ()) -> Iterator[Cluster]:
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


def run(
    hosts: int,
    per_host: int,
    faults: int,
    steps: int,
    draw: random.Random,
    *,
    replicated: bool,
    seconds: int = 0,
    measured: Measured | None = None,
) -> Outcome:
    """Train with so many faults, and compare the losses with a run that was stopped and resumed at
    the same places.

    `seconds` of the faults happen during the recovery from the fault before, in one phase of its
    start after another. Host 0, which has the store where hosts meet, keeps its agent and its link;
    its workers fail as any others.
    """
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        plan = write_plan(hosts, per_host, folder, replicated=replicated, measured=measured)
        more = ("--copy-every", str(EVERY), *_OFTEN, "--checkpoint-every", str(CHECKPOINT_EVERY))
        with cluster(hosts, steps, folder, more) as found:
            campaign = Campaign(found, hosts, plan, draw, outcome)
            if (first := campaign.wait_for(0.0)) is not None:
                outcome.start_s = first.at_s - first.began_s
                phases = cycle(draw.sample(START, len(START)))
                while len(outcome.faults) < faults:
                    left = faults - len(outcome.faults)
                    due = seconds - sum(fault.second for fault in outcome.faults)
                    # As likely as of all turns that are left, of one fault or of two, this is one
                    # of two.
                    twice = left > 1 and draw.random() < due / max(left - due, 1)
                    if not campaign.hit(draw.choice(KINDS), next(phases) if twice else None):
                        break
                campaign.await_hosts()
            deadline = time.monotonic() + GIVE_UP_S + steps
            while not found.ended and time.monotonic() < deadline:
                time.sleep(0.1)
            # Before the reference, which writes its updates there, too.
            outcome.speeds = _speeds(found, plan)
            outcome.whole_s, outcome.stood_s = _standstill(found.updates())
            _check(found, plan, steps, outcome)
    return outcome


class Campaign:
    """Faults that happen to a cluster, one after another."""

    def __init__(
        self, found: Cluster, hosts: int, plan: Plan, draw: random.Random, outcome: Outcome
    ) -> None:
        self._found, self._hosts, self._draw, self._outcome = found, hosts, draw, outcome
        replicated = any(
            len(stage.ranks) > 1 for each in (plan, *plan.smaller) for stage in each.stages
        )
        self._phases = [phase for phase in PHASES if replicated or phase != "all-reduce"]
        self._workers, self._per_host = plan.workers, plan.cluster.gpus // hosts
        self._away = dict[int, threading.Timer]()  # hosts that come back by themselves
        self._back_s = dict[int, float]()  # when those did that had been away last
        self._copied = True  # whether all that hosts have is also on another one

    def wait_for(self, since_s: float, fault: Fault | None = None) -> Update | None:
        """Return the first update by a process that began after a moment; None when the run ends
        before, or hangs.
        """
        deadline = time.monotonic() + GIVE_UP_S
        before = time.monotonic()
        while time.monotonic() < deadline and not self._found.ended:
            if fault is not None and time.monotonic() > before + PAUSE_S:
                fault.paused = True
            before = time.monotonic()
            if (
                fault is not None
                and fault.noticed_s is None
                and (at_s := self._found.noticed_s(since_s)) is not None
            ):
                fault.noticed_s = at_s - since_s
            for update in self._found.updates():
                if update.began_s > since_s:
                    return update
                if (
                    fault is not None
                    and fault.kind == UNPLUGGED
                    and self._is_back(fault.host, update.at_s)
                ):
                    fault.kind = BRIEFLY
                    return update
            time.sleep(0.02)
        return None

    def hit(
        self, kind: str, start: str | None, again: str | None = None, host: int | None = None
    ) -> bool:
        """Let one fault happen, or another one in a phase of the start after it, and wait; return
        False at the end.

        The other one is of the kind `again`, on `host`, or else drawn.
        """
        found, draw = self._found, self._draw
        ended = {
            host for host, process in found.processes.items() if process.poll() is not None
        } - self._away.keys()
        if ended:
            if 0 not in ended:
                self._outcome.problems.append(f"hosts {ended} ended before the run")
            return False
        time.sleep(draw.uniform(0.2, 2.5))
        self._await_copies(kind if start is None else LOST)
        here = (
            None
            if host is None
            else draw.choice([each for each in range(self._hosts) if each != host])
        )
        struck = self._strike(kind, draw.choice(self._phases), here)
        if struck is None:
            return not found.ended
        fault, at_s = struck
        if start is not None:
            # What was on two hosts is on one when a host or its link is lost, until the next copy.
            possible = KINDS if kind in (KILLED, STOPPED) and self._copied else (KILLED, STOPPED)
            if (
                second := self._strike(
                    again or draw.choice(possible), start, host, other=fault.host
                )
            ) is not None:
                self._outcome.faults.append(fault)
                fault, at_s = second
                fault.second = True
        update = self.wait_for(at_s, fault)
        if update is None:
            if not found.ended:
                what = (
                    f"{fault.kind} on host {fault.host} in {fault.phase} after minibatch "
                    f"{fault.minibatch}"
                )
                self._outcome.problems.append(f"{what}: the run did not go on")
            return False
        fault.went_on_s, fault.repeated = update.at_s - at_s, 0
        if update.began_s > at_s:
            fault.began_s, fault.imported_s = update.began_s - at_s, update.imported_s - at_s
            newest = max(each.minibatch for each in found.updates() if each.began_s <= at_s)
            fault.repeated = newest - update.minibatch + 1
        self._outcome.faults.append(fault)
        # Otherwise the next fault may come while a host is taken in.
        deadline = time.monotonic() + (TAKEN_IN_S if draw.random() < 0.5 else 0.0)
        while (
            found.updates()[-1].workers < self._workers
            and time.monotonic() < deadline
            and not found.ended
        ):
            time.sleep(0.1)
        return True

    def _is_back(self, host: int, at_s: float) -> bool:
        """Return whether a host had come back, its link too, before this moment."""
        return self._back_s.get(host, math.inf) < at_s

    def await_hosts(self) -> None:
        """Wait until all that were lost have been started again."""
        for timer in list(self._away.values()):
            timer.join()

    def _await_copies(self, kind: str) -> None:
        while kind in (LOST, UNPLUGGED) and not self._copied and not self._found.ended:
            self._copied = self._found.all_is_copied()
            time.sleep(0.1)

    def _strike(
        self, kind: str, phase: str, host: int | None = None, other: int | None = None
    ) -> tuple[Fault, float] | None:
        """Let a fault happen when a worker comes to a phase; return when it did, or None when it
        did not.

        It is a worker of `host`, or else of any host but the `other` one.
        """
        found, act = self._found, _ACTS[kind]
        hosts = range(0 if kind in (KILLED, STOPPED) else 1, self._hosts)
        here = [
            each
            for each in hosts
            if each != other and each not in self._away and host in (None, each)
        ]
        if not here:
            return None
        host, rank = self._draw.choice(here), self._draw.randrange(self._per_host)
        newest = found.updates()[-1].minibatch
        fault = Fault(
            kind, phase, host, newest, sum(len(found.workers(each)) for each in range(self._hosts))
        )
        struck = found.folder / STRUCK
        pid = self._await_phase(fault, rank, act)
        if found.ended or (pid is None and not struck.exists()):
            return None
        if act != "hold" and pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if act == "kill" else signal.SIGSTOP)
        if kind in (LOST, UNPLUGGED):
            self._back_s.pop(host, None)
            self._away[host] = threading.Timer(
                self._draw.uniform(*AWAY_S), self._come_back, (kind, host)
            )
            self._away[host].start()
        if kind == LOST:
            found.lose(host)
        elif kind == UNPLUGGED:
            found.link(host, "down")
        struck.unlink(missing_ok=True)
        self._copied = self._copied and kind in (KILLED, STOPPED)
        fault.minibatch = found.updates()[-1].minibatch
        return fault, time.time()

    def _await_phase(self, fault: Fault, rank: int, act: str) -> int | None:
        """Let a worker be hit when it comes to the fault's phase; return it where it does not come
        there in time.
        """
        found, struck = self._found, self._found.folder / STRUCK
        wish = found.folder / f"wish-{fault.host}-{rank}"
        hidden = wish.with_name(f".{wish.name}")
        delay_s = self._draw.uniform(0.0, AFTER_S.get(fault.phase, 0.0))
        hidden.write_text(f"{fault.phase} {act} {delay_s}", encoding="utf-8")
        hidden.rename(wish)
        deadline = time.monotonic() + (RECOVERED_S if fault.phase in START else STRIKE_WITHIN_S)
        while not struck.exists() and time.monotonic() < deadline and not found.ended:
            time.sleep(0.001)
        wish.unlink(missing_ok=True)
        if struck.exists():
            fault.phase = struck.read_text(encoding="utf-8")
            return None
        if found.ended or fault.phase in START:
            return None
        fault.phase = "any"
        return found.workers(fault.host).get(rank)

    def _come_back(self, kind: str, host: int) -> None:
        if kind == LOST:
            self._found.start(host)
        else:
            self._found.link(host, "up")
        self._back_s[host] = time.time()
        del self._away[host]


def _standstill(updates: Sequence[Update]) -> tuple[float, list[float]]:
    """Return the seconds from the first update to the last, and those between two updates with a
    start in between.
    """
    if not updates:
        return 0.0, []
    pairs = pairwise(updates)
    stood_s = [
        after.at_s - before.at_s for before, after in pairs if after.began_s > before.began_s
    ]
    return updates[-1].at_s - updates[0].at_s, stood_s


def _speeds(found: Cluster, plan: Plan) -> list[tuple[str, float, float]]:
    """Return the predicted and the median measured seconds per minibatch of each plan that trained
    for a while.
    """
    plans = {each.workers: each for each in (plan, *plan.smaller)}
    steps: dict[int, list[float]] = {}
    for before, after in pairwise(found.updates()):
        # of one start, without a copy between them
        if before.began_s == after.began_s and after.minibatch % EVERY > 1:
            steps.setdefault(after.workers, []).append(after.at_s - before.at_s)
    whole = {plans[workers]: own for workers, own in sorted(steps.items()) if len(own) >= 2 * EVERY}
    return [
        (each.config, each.predicted.seconds_per_minibatch, statistics.median(own))
        for each, own in whole.items()
    ]


def _check(found: Cluster, plan: Plan, steps: int, outcome: Outcome) -> None:
    texts = [(found.folder / f"out-{host}").read_text(encoding="utf-8") for host in found.processes]
    # A host whose link was still down at the end has an error to tell.
    results = [answer for text in texts if text and "losses" in (answer := json.loads(text))]
    if len(results) != 1:
        tail = "".join(
            (found.folder / f"err-{host}").read_text("utf-8")[-1500:] for host in found.processes
        )
        outcome.problems.append(f"{len(results)} results instead of one\n{tail}")
        return
    (result,) = results
    expected = reference(plan, result["restarts"], steps, found.folder)
    if [each["minibatch"] for each in result["losses"]] != list(range(steps)):
        outcome.problems.append("minibatches are missing in the losses, or there twice")
    elif result["losses"] != expected["losses"]:
        pairs = zip(result["losses"], expected["losses"], strict=True)
        differs = next(a["minibatch"] for a, b in pairs if a != b)
        outcome.problems.append(f"losses differ from minibatch {differs} on")
    # A run that is stopped evaluates there, too.
    if not all(each in expected["evaluations"] for each in result["evaluations"]):
        outcome.problems.append("evaluations differ")
    for fault in outcome.faults:
        if fault.repeated is not None and fault.repeated > 2 * EVERY:
            outcome.problems.append(
                f"{fault.kind}: {fault.repeated} minibatches were trained again"
            )


def _environment(*folders: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders))),
        "OMP_NUM_THREADS": "1",
    }
