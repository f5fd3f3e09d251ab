"""What a plan is priced for: cluster and schedule in one record."""

from dataclasses import dataclass

from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule


@dataclass(frozen=True)
class Setting:
    """What a plan is priced for; raises InputError for microbatches or chunks that make no
    sense.
    """

    cluster: Cluster
    schedule: Schedule = ONE_F_ONE_B
    # per minibatch, each of the profile's size; 1 for schedules that do not split minibatches
    microbatches: int = 1
    chunks: int = 1  # stages per worker; 1 for schedules without chunks

    def __post_init__(self) -> None:
        schedule = self.schedule
        microbatches = self.microbatches
        if microbatches < 1:
            raise InputError(
                f"{microbatches} microbatches make no minibatch",
                hint="give `microbatches` 1 or more",
            )

        if self.chunks < 1:
            raise InputError(f"{self.chunks} chunks hold no model", hint="give `chunks` 1 or more")
        assert self.chunks == 1 or schedule.chunked
        if not schedule.divides and microbatches > 1:
            dividing = [each.name for each in SCHEDULES if each.divides]
            raise InputError(
                f"{schedule} does not split a global batch into microbatches, so "
                f"`microbatches={microbatches}` does not apply",
                hint=f"use `schedule` {', '.join(dividing[:-1])} or {dividing[-1]}, or leave "
                f"`microbatches` out",
            )

    def workers_of(self, stages: int) -> list[int]:
        """Return the worker of each stage."""
        return [
            self.schedule.worker_of(stage, max(1, stages // self.chunks)) for stage in range(stages)
        ]
