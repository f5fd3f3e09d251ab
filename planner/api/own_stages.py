"""Read what `planner.price` is told of each stage, as one writes it on a command line.

stages            4              as many, of equally many blocks
                  6,6,7,5        the blocks of each
                  norm1,head.0   the last layer of each but the last
replicas          2              of each stage
                  2,1            of the first and of the second; 2x4 is two replicas of four ranks
recompute         all, 0,2       whole stages; 0:3 is three blocks of stage 0, each by itself, and
                                 0:attention the attention of every block alone
shard_optimizer   all, 0:2       with the sharding level after a colon
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from planner.analysis.given_plan import check_enough_gpus, equal_stages, stages_ending_at
from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.profile import Profile
from planner.options.numbers import is_count
from planner.options.verbs import PriceOptions
from planner.schedule.registry import find
from planner.stages.sharding import Sharding, is_level, why_no_group

Stages: TypeAlias = int | str | Sequence[int] | Sequence[str]


_Choice: TypeAlias = bool | int | Literal["attention"]


class Replicas(NamedTuple):
    """How many replicas a stage has, and how many ranks each of them."""

    number: int
    ranks: int


def own_plan(profile: Profile, cluster: Cluster, wanted: Stages, options: PriceOptions) -> OwnPlan:
    """Return the plan that the arguments describe; replicas default to as many as there are GPUs
    for.

    Raises:
        InputError: for what describes no stages, with the argument's name; for more GPUs than there
            are.
    """
    schedule = find(options.schedule)
    stages = _stages(wanted, profile)
    count = len(stages)

    chunks = schedule.fixed_chunks or options.chunks
    most_replicas = max(1, cluster.gpus * chunks // count)
    replicas = _replicas(options.replicas, count, most_replicas)
    check_enough_gpus(sum(each.number * each.ranks for each in replicas) // chunks, cluster)
    recompute = _chosen_stages("recompute", options.recompute, count)
    sharding, group = _sharding(options.shard_optimizer, count)

    described = []
    for number, (stage, own_replicas) in enumerate(zip(stages, replicas, strict=True)):
        if group is not None:
            level = int(sharding.get(number, 0))
            _check_group(Sharding(level, group), own_replicas.number, options.shard_optimizer)
        described.append(
            OwnStage(
                blocks=stage.blocks,
                layers=stage.layers,
                replicas=own_replicas.number,
                tensor=own_replicas.ranks,
                sharded=own_replicas.number > 1 and number in sharding,
                sharding_level=int(sharding.get(number, 1)),
                shard_group=group,
                recompute=recompute.get(number, False),
            )
        )

    return OwnPlan(
        stages=tuple(described),
        schedule=schedule,
        microbatches=options.microbatches,
        chunks=options.chunks,
    )


def _parts(given: Any) -> list[str]:
    """Return what stands between the commas, or the items of a list or a mapping as texts."""
    if isinstance(given, Mapping):
        return [f"{stage}:{units}" for stage, units in given.items()]
    if isinstance(given, int | str):
        return str(given).split(",")
    return [str(part) for part in given]


def _stages(wanted: Stages, profile: Profile) -> list[OwnStage]:
    parts = _parts(wanted)
    if not parts:
        raise InputError(
            "`stages` is empty",
            hint="give the number of stages, the blocks of each, or the last layer of each but "
            "the final one",
        )

    if not all(is_count(part) for part in parts):
        return stages_ending_at(profile, parts)
    if len(parts) == 1:
        return equal_stages(profile, int(parts[0]))
    if "0" in parts:
        raise InputError(
            f"`stages={','.join(parts)}` has a stage without blocks",
            hint="give each stage at least one block",
        )

    return [OwnStage(blocks=int(part)) for part in parts]


def _replicas(given: Any, stages: int, most: int) -> list[Replicas]:
    """Return the replicas of each stage; `most` of each where nothing is given."""
    if given is None:
        return [Replicas(most, 1)] * stages

    parts = _parts(given)
    each = [_read_replicas(part) for part in parts]
    read = [replicas for replicas in each if replicas is not None]
    if len(read) < len(each) or len(read) not in (1, stages):
        example = ",".join("2" + "1" * (stages - 1))
        raise InputError(
            f"`replicas={','.join(parts)}` does not say how many replicas each of {stages} stages "
            f"has",
            hint=f"give one number for all, or one for each, 1 or more: `replicas={example}`",
        )

    if len(read) != 1:
        return read
    return read * stages


def _read_replicas(text: str) -> Replicas | None:
    """Read "2", or "2x4" for two replicas of four ranks; None for anything else."""
    count, times, ranks = text.partition("x")
    if not times:
        ranks = "1"
    if not (is_count(count) and is_count(ranks)):
        return None
    replicas = Replicas(int(count), int(ranks))
    return replicas if min(replicas) > 0 else None


def _sharding(given: Any, stages: int) -> tuple[dict[int, _Choice], int | None]:
    """Return the sharding level of each stage that is named, and the size of groups that repeat
    each other, if any.
    """
    if isinstance(given, bool) or "/" not in str(given):
        return _chosen_stages("shard_optimizer", given, stages), None
    which, _, size = str(given).partition("/")
    if not (is_count(size) and int(size) > 0):
        raise InputError(
            f"`shard_optimizer={given}` does not end with the size of groups of replicas",
            hint="for example: `shard_optimizer=all:3/8`, for a plan of one stage",
        )

    return _chosen_stages("shard_optimizer", which, stages), int(size)


def _check_group(sharding: Sharding, replicas: int, given: Any) -> None:
    problem = why_no_group(sharding, replicas)
    if problem is None:
        return
    sizes = [str(size) for size in range(2, replicas) if replicas % size == 0]
    some = "more replicas"
    if sizes:
        some = f"groups of {' or '.join(sizes)} of all {replicas}"
    raise InputError(f"`shard_optimizer={given}`: {problem}", hint=f"take level 2 or 3, and {some}")


def _chosen_stages(name: str, given: Any, stages: int) -> dict[int, _Choice]:
    """Return the stages that "all" or "0,1:4" names, each with what follows its colon, or True."""
    if given is False:
        return {}
    parts = ["all"] if given is True else _parts(given)

    chosen: dict[int, _Choice] = {}
    for part in parts:
        which, colon, number = part.partition(":")
        if which == "all":
            numbered = list(range(stages))
        elif is_count(which) and int(which) < stages:
            numbered = [int(which)]
        else:
            raise InputError(
                f"`{name}={part}` names none of the stages, which count from 0 to {stages - 1}",
                hint=f"for example: `{name}=0`, or all",
            )
        value = _read_value(name, part, which, number) if colon else True
        chosen.update(dict.fromkeys(numbered, value))

    return chosen


def _read_value(name: str, part: str, which: str, number: str) -> int | Literal["attention"]:
    """Return the number of blocks to recompute, or the sharding level, after the colon of a
    part.
    """
    recomputes = name == "recompute"
    if recomputes and number == "attention":
        return "attention"
    valid = is_count(number) and int(number) > 0
    if valid and (recomputes or is_level(int(number))):
        return int(number)
    wanted = "1, 2 or 3"
    if recomputes:
        wanted = "a number of blocks, 1 or more, or attention"
    raise InputError(
        f"`{name}={part}` does not end with {wanted}", hint=f"for example: `{name}={which}:2`"
    )
