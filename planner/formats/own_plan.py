"""A configuration that somebody chose by hand: what `planner.price` prices."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.formats.files import Record
from planner.formats.plan_parts import ScheduleField
from planner.formats.quantities import Parts, Workers
from planner.schedule.instructions import CHUNKS
from planner.schedule.registry import DEFAULT
from planner.stages.sharding import ShardedReplicas, Sharding, why_no_group
from planner.stages.tensor import DividedLayers


class OwnStage(Record, ShardedReplicas, DividedLayers):
    """One stage: how many of the model's blocks it has, or the names of its layers."""

    blocks: Parts | None = None
    layers: tuple[str, ...] = ()  # as in the profile
    replicas: Workers = 1
    tensor: Workers = 1  # ranks of a replica, which divide every layer between them
    sharded: bool = False  # the replicas divide the optimizer's state
    # of a plan's only stage: 2 gradients, too, 3 weights, too
    sharding_level: Annotated[int, Field(ge=1, le=3)] = 1
    # replicas that divide these two; others repeat them
    shard_group: Annotated[int, Field(ge=2)] | None = None
    # Runs its forward again before each backward: true for the whole stage, a number for that many
    # of its units, the first ones, each by itself; or attention alone, in every unit.
    recompute: bool | Parts | Literal["attention"] = False

    @model_validator(mode="after")
    def _check_one(self) -> "OwnStage":
        if (self.blocks is None) == (not self.layers):
            raise ValueError("a stage has either blocks or layers")
        if self.sharded and self.replicas == 1:
            raise ValueError("one replica has nobody to shard the optimizer's state with")
        problem = why_no_group(self.sharding, self.replicas)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def level(self) -> int:
        """The sharding level: 0 where nothing is sharded."""
        if self.sharded:
            return self.sharding_level
        return 0

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.level, self.shard_group or 0)


class OwnPlan(Record):
    """Stages in order, and the schedule that runs them."""

    stages: Annotated[tuple[OwnStage, ...], Field(min_length=1)]
    schedule: ScheduleField = Field(default=DEFAULT.name, validate_default=True)
    microbatches: Parts | None = None  # per minibatch; None as `plan solve` chooses
    chunks: Parts = CHUNKS  # stages per GPU, where the schedule leaves the choice
