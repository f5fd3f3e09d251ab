"""The trainers whose words are read and written, each with one reader and one writer of
`Configuration`.

A new one is a file beside this one, and a line here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlanError
from planner.exports.accelerate import read_accelerate, write_accelerate
from planner.exports.configuration import Asked, Configuration
from planner.exports.deepspeed import read_deepspeed, write_deepspeed
from planner.exports.megatron import read_arguments, write_arguments
from planner.exports.settings import text_of
from planner.exports.torchtitan import read_torchtitan, write_torchtitan
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.plan.blocks import recomputes_parts, units_of_stage
from planner.plan.rank_groups import sample_parts
from planner.schedule.one_stage import FLUSH
from planner.stages.sharding import Sharding

Reader = Callable[[str, Asked], Configuration]
Writer = Callable[[Configuration, str], str]


@dataclass(frozen=True)
class Trainer:
    """How a trainer is told what to run.

    Attributes:
        option: the argument of `planner.fit` that gives its words.
        title: its name.
        read: returns what its words say.
        write: returns the words for a configuration, like those that were given; raises PlanError
            where there are none.
        in_file: whether the words are a file's.
        says_batches: whether they say how many samples a forward and an update have.
        says_recomputation: whether they say which layers recompute.
        for_transformers: whether they are for models with a numbered list of layers alone, also
            without a pipeline.
    """

    option: str
    title: str
    read: Reader
    write: Writer
    in_file: bool = True
    says_batches: bool = True
    says_recomputation: bool = True
    for_transformers: bool = False

    def words(self, given: str | Path) -> str:
        """Return the words themselves, of a file where they are in one."""
        return text_of(Path(given)) if self.in_file else str(given)

    def in_script(self, run: Configuration, words: str) -> Iterator[str]:
        """Yield what the script must say of a configuration, where its words have no place for
        it.
        """
        if not self.says_batches:
            assert run.gpus is not None
            yield f"{run.micro_batch} samples per forward"
            yield f"gradients of {run.accumulation(run.gpus)} forwards accumulated"
        # accelerate's section on FSDP says it.
        said = self.says_recomputation or "activation_checkpointing: true" in words
        if run.recomputes and not said:
            yield "gradient checkpointing on"


TRAINERS: tuple[Trainer, ...] = (
    Trainer(
        "megatron",
        "Megatron",
        read_arguments,
        write_arguments,
        in_file=False,
        for_transformers=True,
    ),
    Trainer("torchtitan", "torchtitan", read_torchtitan, write_torchtitan),
    Trainer("deepspeed", "DeepSpeed", read_deepspeed, write_deepspeed, says_recomputation=False),
    Trainer(
        "accelerate",
        "accelerate",
        read_accelerate,
        write_accelerate,
        says_batches=False,
        says_recomputation=False,
    ),
)


def configuration_of(plan: Plan) -> Configuration:
    """Return how a trainer that copies whole pipelines is told to run a plan.

    Raises:
        PlanError: for a plan that copies none, or whose ranks divide experts and samples.
    """
    if any(len(set(counts)) > 1 for counts in (plan.replicas, plan.degrees)):
        raise PlanError(f"trainers copy whole pipelines, and '{plan.config}' has other stages")
    if sample_parts(plan) > 1:
        raise PlanError(f"ranks that share '{plan.model}' shard its experts here, not its layers")
    if plan.minibatch_size is None or plan.microbatch_size is None:
        raise PlanError(f"it is not known how many samples a microbatch of '{plan.model}' has")
    if plan.schedule.stashes or any(
        stage.sharding != plan.stages[0].sharding for stage in plan.stages
    ):
        raise PlanError(f"trainers have no form for '{plan.config}' under {plan.schedule}")

    if any(recomputes_parts(stage.layers, stage.recompute_groups) for stage in plan.stages):
        raise PlanError(f"trainers recompute whole layers, and '{plan.config}' parts of them")
    stages = [units_of_stage(stage.layers, ()) for stage in plan.stages]
    counts = tuple(map(len, stages))
    recomputed = [
        _count_recomputed(units, stage.recomputed_layers)
        for units, stage in zip(stages, plan.stages, strict=True)
    ]
    whole = recomputed == list(counts)
    chunks = plan.chunks
    workers = plan.ranks_per_replica * plan.replicas[0]
    run = Configuration(
        tensor=plan.ranks_per_replica,
        pipeline=len(counts) // chunks,
        gpus=workers * (len(counts) // chunks),
        micro_batch=plan.microbatch_size,
        global_batch=plan.minibatch_size,
        schedule=plan.schedule if len(counts) > 1 else FLUSH,
        recomputes=any(recomputed),
        recomputed_layers=None if whole or not any(recomputed) else max(recomputed),
        sequence_parallel=plan.cluster.sequence_parallel and plan.ranks_per_replica > 1,
        sharding=plan.stages[0].sharding if plan.replicas[0] > 1 else Sharding(),
        offload=plan.cluster.offload is not None,
    )
    if len(set(counts)) > 1:
        return replace(run, stage_layers=counts)
    return replace(run, chunks=chunks if chunks > 1 else None)


def _count_recomputed(units: Sequence[Sequence[str]], recomputed: Iterable[str]) -> int:
    """Return how many of a stage's blocks run their forward again, in part or as a whole."""
    again = set(recomputed)
    return sum(1 for unit in units if again.intersection(unit))
