"""Comparing batches before updates stops no rank for good: scripts with any number of stages and
replicas, in turn.

Each rank hands minibatches in, carries out what these allow, and waits for messages, for replicas,
for the comparison before each update, and for losses, which come some minibatches late. No
processes: ranks go on one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.executor.run.loop import Loop
from planner.formats.plan import Plan
from planner.plan.shape import shape_of
from planner.schedule.derived import segment_stream
from planner.schedule.instructions import (
    AllReduce,
    Instruction,
    Receive,
    Send,
    Update,
    matching_receive,
)
from planner.schedule.schedule import PipelineShape
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

MINIBATCHES = 24
REPLICAS = [
    (1, 1),
    (2,),
    (4,),
    (2, 1),
    (1, 2),
    (3, 1),
    (2, 2),
    (1, 3),
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (4, 2, 1),
]


class Ranks:
    """What all ranks have announced and sent so far."""

    def __init__(self, plan: Plan) -> None:
        self.shape: PipelineShape = shape_of(plan)
        self.lag = max(stage.in_flight * stage.replicas for stage in plan.stages)
        self.announced = dict.fromkeys(self.shape.first_stages, 0)
        self.shared = dict.fromkeys(self.shape.first_stages, 0)  # losses
        self.sent: set[Receive] = set()
        self.reduced: dict[tuple[int, int], set[int]] = {}

    def allows(self, instruction: Instruction, rank: int) -> bool:
        """Return whether the rank can carry the instruction out now."""
        match instruction:
            case Update():
                return min(self.announced.values()) >= self.loop._minibatches_in(
                    instruction.stage, instruction.round
                )
            case AllReduce():
                arrived = self.reduced.setdefault((instruction.stage, instruction.round), set())
                arrived.add(rank)
                return arrived == set(self.shape.ranks[instruction.stage])
            case _ if isinstance(instruction, Receive):
                return instruction in self.sent
            case _ if isinstance(instruction, Send):
                self.sent.add(matching_receive(instruction, rank))
        return True

    @property
    def loop(self) -> Loop:
        """A loop without workers, for what minibatches allow."""
        loop = object.__new__(Loop)
        loop.first = 0
        loop._context = cast("Any", SimpleNamespace(shape=self.shape))
        return loop

    def script(self, rank: int) -> Iterator[None]:
        """Run a rank's script; yield where it waits."""
        loop = self.loop
        loop._stream = cast(
            "Any", segment_stream(self.shape, self.shape.first_stages[rank], rank, 0, 2**40)
        )
        loop._next, loop._executed = None, 0
        for count in range(1, MINIBATCHES + 1):
            self.announced[rank] = count
            for instruction in loop._allowed(count):
                while not self.allows(instruction, rank):
                    yield
            self.shared[rank] = count
            while min(self.shared.values()) < count - self.lag:
                yield


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_no_rank_waits_for_good(replicas: tuple[int, ...], tmp_path: Path) -> None:
    plan = make_plan(structural_profile(write_model(tmp_path, "blocks", "sgd"), 4), replicas)
    assert plan.schedule.asynchronous
    ranks = Ranks(plan)
    scripts = {rank: ranks.script(rank) for rank in ranks.shape.first_stages}
    for _ in range(100 * MINIBATCHES):
        for rank in list(scripts):
            if next(scripts[rank], "ended") == "ended":
                del scripts[rank]
    assert not scripts, f"ranks {list(scripts)} wait, and have handed in {ranks.announced}"
