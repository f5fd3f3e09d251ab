"""Write the table of what a plan may choose, and what is done with each choice."""

from collections.abc import Iterator
from typing import NamedTuple

from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule

HEADER = ("axis", "planned", "priced", "simulated", "exported", "trained")


class Axis(NamedTuple):
    """A row: what there is of an axis, in a few words, or "no"."""

    name: str
    planned: str
    priced: str
    simulated: str
    exported: str
    trained: str


# Stage options have no common type that could be asked: each is a file of planner/stages.
STAGE_OPTIONS = (
    Axis("pipeline stages, of any length", "yes", "yes", "yes", "Megatron, torchtitan", "yes"),
    Axis("replicas, differing by stage", "yes", "yes", "yes", "equally many", "yes"),
    Axis("tensor parallelism", "yes", "yes", "yes", "Megatron, torchtitan", "yes"),
    Axis("sequence parallelism, with it", "`--sequence-parallel`", "yes", "yes", "Megatron", "yes"),
    Axis("experts sharded in a server", "yes", "yes", "yes", "Megatron, torchtitan", "yes"),
    Axis("experts sharded over servers", "`plan fit`", "yes", "yes", "Megatron, torchtitan", "no"),
    Axis("ZeRO-1", "yes", "yes", "yes", "Megatron", "yes"),
    Axis("ZeRO-2, ZeRO-3 (FSDP), HSDP", "single stage", "yes", "yes", "torchtitan", "single stage"),
    Axis("FSDP of sharded layers (2-D)", "estimates", "yes", "yes", "torchtitan", "no"),
    Axis("recomputation, by layers", "yes", "yes", "yes", "Megatron", "yes"),
    Axis("recomputation, attention alone", "`plan price`", "yes", "yes", "Megatron", "yes"),
    Axis("loss in chunks of tokens", "`--stack compiled`", "yes", "yes", "no", "unsharded layers"),
    Axis("context parallelism", "yes", "yes", "yes", "Megatron, torchtitan", "unsharded layers"),
    Axis("optimizer states in bfloat16", "`plan fit`", "yes", "yes", "no", "as one process"),
    Axis("optimizer states in 8 bits", "`plan fit`", "yes", "yes", "no", "unsharded layers"),
    Axis("optimizer in host memory", "`--offload optimizer`", "yes", "yes", "DeepSpeed", "no"),
    Axis("offload of weights or activations", "no", "no", "no", "no", "no"),
)


def axis_table() -> str:
    """Return the table of stage options and schedules."""
    rows = [HEADER, ("---",) * len(HEADER), *STAGE_OPTIONS, *_schedule_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _schedule_rows() -> Iterator[Axis]:
    for schedule in SCHEDULES:
        yield Axis(
            f"`{schedule}`",
            planned="no" if schedule.formula is None else "yes",
            priced="by simulation" if schedule.formula is None else "yes",
            simulated="yes",
            exported=_exported(schedule),
            trained="its own, stale" if schedule.asynchronous else "as one process",
        )


def _exported(schedule: Schedule) -> str:
    """Return the programs that run the schedule itself, or the nearest one that torchtitan has."""
    if schedule.asynchronous:
        return "as 1f1b-flush"
    programs = []
    if not schedule.splits_backward and schedule.alternates:
        programs.append("Megatron")
    own = schedule.torch_name.removeprefix("Schedule")
    programs.append(f"torchtitan, as {own}" if schedule.torch_differs else "torchtitan")
    return ", ".join(programs)
