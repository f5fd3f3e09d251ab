"""What is wrong with a run on simulated devices: by what the devices have, and by the rules for
their hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from planner.errors import PlannerError
from tests.executor.device.rules import (
    HostWait,
    NCCLDeadlock,
    Operation,
    Post,
    Recording,
    StreamWait,
    Work,
    check,
)
from tests.executor.device.runs import Make, Run, carry_out
from tests.executor.device.simulated import RaceError
from tests.executor.device.world import World

# Their messages of two neighbours fit together: one sends and takes what the other takes and sends.
STRAIGHT = ("1f1b", "1f1b-flush", "2bw", "gpipe", "zb-h1")


def finding(
    run: Run,
    seed: int | None,
    make: Make | None = None,
    expected: Mapping[tuple[int, str], Tensor] | None = None,
) -> str | None:
    """Carry out a run; return the first thing that is wrong with it, None if nothing is.

    Args:
        expected: the weights that each rank is to end with, by rank and name.
    """
    try:
        world = carry_out(run, seed, buffered=bool(seed and seed % 2), make=make)
    except (RaceError, NCCLDeadlock, PlannerError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    for key, value in (expected or {}).items():
        if not world.results[key].equal(value):
            return f"{key} is {world.results[key]} in place of {value}"
    return next(_broken(run, world), None)


def _broken(run: Run, world: World) -> Iterator[str]:
    """Yield the rules that the hosts of a run broke, which its devices bore this time."""
    recording = world.recording
    straight = (
        run.schedule in STRAIGHT
        and set(run.replicas) == {1}
        and not (run.skips or run.tied or run.degrees)
    )
    ways: list[dict[str, Any]] = [{"waiting": range(run.workers)}, {"rendezvous": True}]
    if straight and not run.evaluate_every:
        ways.append({"waiting": range(run.workers), "rendezvous": True})
    ways.append({"waiting": range(run.workers), "rendezvous": True, "taking": True})
    yield from filter(None, (_deadlock(recording, **how) for how in ways))
    yield from (
        f"rank {rank} takes memory while messages are under way" for rank in takes_late(recording)
    )
    # A replica without a unit in a round must know whether others had gradients.
    units = (
        run.minibatches if run.shape.asynchronous and run.microbatches == 1 else run.microbatches
    )
    idle = any(units % replicas for replicas in run.replicas)
    plain = not (run.clipped or run.autocast or run.evaluate_every or run.traced or idle)
    for rank, operations in recording.items():
        if plain and any(isinstance(each, HostWait) and each.read for each in operations):
            yield f"rank {rank}'s host waits to read its device's memory"
        receives = waited = 0
        for each in operations:
            waited += isinstance(each, StreamWait)
            if isinstance(each, Post) and each.kind == "receive" and each.number:
                receives += 1
                if each.number > 1 and each.computed == waited:
                    yield (
                        f"rank {rank}'s receive {each.number} on {each.communicator} waits for "
                        f"the newest computation"
                    )
        if world.devices.headers[rank] < receives:
            yield (
                f"rank {rank} checked {world.devices.headers[rank]} headers of {receives} messages"
            )


def takes_late(recording: Recording) -> list[int]:
    """Return the ranks whose hosts take memory of a device, or pinned memory, after their first
    message.
    """
    return [rank for rank, operations in recording.items() if _takes_after_messages(operations)]


def _takes_after_messages(operations: Sequence[Operation]) -> bool:
    # The first operation on a communicator, number 0, says nothing, and ends before the next.
    sent = (
        index
        for index, each in enumerate(operations)
        if isinstance(each, Post) and each.number and each.kind != "all"
    )
    first = next(sent, len(operations))
    return any(isinstance(each, Work) and each.takes for each in operations[first:])


def _deadlock(recording: Recording, **how: Any) -> str | None:
    try:
        check(recording, **how)
    except NCCLDeadlock as error:
        return f"{type(error).__name__}: {error}"
    return None
