"""Start hosts with their workers once, and give them one task after the other."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kept import ROOT
from benchmarks.netns import Network, shaped_network
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, Level
from planner.workers.job import Job, TrainResult

START_S = 120.0
LINKS_S = 90.0  # for the measurement of all links; where it would take longer, less is sent
MESSAGE_BYTES = 2_000_000  # of messages that links are measured with
FEW = 8  # hosts; more have more links, which are measured one after the other
FIRST_PORT = 20_000
# Passes the shapers at full speed after a pause. It must be small next to a message, and more than
# what a link carries while a timer is late: those of workers that compute are not scaled, and up to
# twenty times as fast.
BURST, COMPUTING_BURST = "4kb", "16kb"
# Of a socket, by Linux's defaults; scaled like all bytes. The machine's delays are not: an answer
# may take 10 ms, in which a fast link here carries 120 kB, and the kernel counts about twice what
# is sent.
SEND_BYTES, RECEIVE_BYTES = 4 * 2**20, 6 * 2**20
LEAST_SOCKET_BYTES = 2**18


class TestbedError(PlannerError):
    """A run on the testbed failed or hung."""


@dataclass
class Testbed:
    """Hosts with a worker each, made by `testbed`."""

    network: Network
    nursery: subprocess.Popen[str]
    _links: dict[tuple[Any, ...], Cluster] = field(default_factory=dict)
    _tasks: int = 0

    __test__ = False  # tells pytest that this is no test class

    def links(
        self, nominal: Cluster, message_bytes: int | None = None, byte_factor: float = 1.0
    ) -> Cluster:
        """Shape the links like those of `nominal`, and return them as its workers measure them.

        Args:
            nominal: the rates of the shapers.
            message_bytes: of the long messages; None for a size that is measured quickly.
            byte_factor: of what is sent, which sockets' buffers are scaled by, too.
        """
        message_bytes = message_bytes or (
            MESSAGE_BYTES if nominal.gpus <= FEW else MESSAGE_BYTES // 2
        )
        rates = tuple(level.bandwidth_bytes_per_s for level in nominal.levels)
        sizes = tuple(level.size for level in nominal.levels)
        send_bytes, receive_bytes = (
            max(LEAST_SOCKET_BYTES, round(size * byte_factor))
            for size in (SEND_BYTES, RECEIVE_BYTES)
        )
        key = (rates, sizes, send_bytes)
        inner, *outer = (f"{8 * rate:.0f}bit" for rate in rates)
        self.network.limit_sockets(send_bytes, receive_bytes)
        self.network.shape(inner, sizes[0] if outer else 1, *outer)
        if key not in self._links:
            task = {"kind": "links", "message_bytes": message_bytes, "budget_s": LINKS_S}
            answer = self._ask(task, nominal, 1.0, START_S + 2 * LINKS_S)
            # Emulated devices sleep while they compute, which leaves the cores to the messages, and
            # to their codecs.
            levels = [level | dict.fromkeys(Level.later_fields) for level in answer["levels"]]
            at_once = max(1.0, nominal.gpus / (os.cpu_count() or 1))
            times = [
                each | {"s_per_byte": each["s_per_byte"] / at_once}
                for each in answer["codec_times"]
            ]
            changes = {"overlap": True, "levels": levels, "codec_times": times}
            self._links[key] = Cluster.model_validate(answer | changes)
        return self._links[key]

    def train(
        self, job: Job, cluster: Cluster, byte_factor: float, timeout_s: float
    ) -> TrainResult:
        """Run a job on the links that were shaped last."""
        task = {"kind": "train", "job": job.model_dump(mode="json")}
        return TrainResult.model_validate(
            self._ask(task, cluster, byte_factor, timeout_s, job.plan.workers)
        )

    def _ask(
        self,
        task: dict[str, Any],
        cluster: Cluster,
        byte_factor: float,
        timeout_s: float,
        world: int | None = None,
    ) -> dict[str, Any]:
        self._tasks += 1
        task |= {
            "world": world or cluster.gpus,
            "per_server": cluster.levels[0].size if len(cluster.levels) > 1 else 1,
            "byte_factor": byte_factor,
            "address": self.network.hosts[0].address,
            "port": FIRST_PORT + self._tasks,
        }
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(json.dumps(task) + "\n")
        self.nursery.stdin.flush()
        answer = _read(self.nursery, timeout_s)
        if "error" in answer:
            raise TestbedError(f"a run on the testbed failed: {answer['error']}")
        return answer


@contextmanager
def testbed(hosts: int, *, computing: bool = False) -> Iterator[Testbed]:  # noqa: PT028  (no test)
    """Yield `hosts` hosts with a worker each; at the end all of it is removed.

    Args:
        hosts: how many.
        computing: the workers compute, and so share the machine with its other work. Emulated
            devices sleep, and run ahead of it.

    Raises:
        NetworkUnavailableError: when this machine or this user cannot make namespaces.
        TestbedError: when the workers do not start.
    """
    with shaped_network(hosts, COMPUTING_BURST if computing else BURST) as net:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        # otherwise it warns that the hosts have no names
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        nursery = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.testbed.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        try:
            assert nursery.stdin is not None
            nursery.stdin.write(
                json.dumps({"hosts": [host.name for host in net.hosts], "ahead": not computing})
                + "\n"
            )
            nursery.stdin.flush()
            _read(nursery, START_S)
            yield Testbed(net, nursery)
        finally:
            nursery.kill()
            nursery.wait()
            for stream in (nursery.stdin, nursery.stdout):
                if stream is not None:
                    stream.close()


testbed.__test__ = False  # type: ignore[attr-defined]  # nor a test


def _read(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """Return the nursery's next line."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    if not ready:
        raise TestbedError(f"the workers did not answer within {timeout_s:.0f} s")
    line = process.stdout.readline()
    if not line:
        raise TestbedError("the workers ended without an answer")
    answer: dict[str, Any] = json.loads(line)
    return answer
