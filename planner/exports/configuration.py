"""How a trainer is told to run: one record for Megatron, torchtitan, DeepSpeed and accelerate.

A file beside this one reads and writes the record for each of them, in that trainer's own words.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError
from planner.formats.names import EightBits, StackName
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH
from planner.schedule.schedule import Schedule
from planner.stages.sharding import UNSHARDED, Sharding


@dataclass(frozen=True)
class Asked:
    """What a question says beside a trainer's file, which leaves some of it to the script.

    Attributes:
        gpus: how many there are.
        micro_batch: samples of a microbatch.
        global_batch: samples whose gradients make an update.
        recomputes: whether layers run their forward again.
        file: the trainer's file, which may name others beside it.
    """

    gpus: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    recomputes: bool | None = None
    file: Path = Path()


@dataclass(frozen=True)
class Configuration:
    """What a trainer's options or file say, as far as they are understood.

    Attributes:
        tensor: ranks that divide each layer.
        pipeline: workers, or groups of them, that a pipeline has.
        micro_batch: samples of a microbatch.
        global_batch: samples whose gradients make an update.
        gpus: all of them, where the file says how many.
        machines: servers that these are in, likewise.
        layers: of the model, likewise.
        length: tokens of a sample, likewise.
        schedule: that runs the stages; interleaved where workers have several of them.
        chunks: stages on each worker, where the file says how many.
        layers_per_chunk: or how many layers each of these has.
        stage_layers: of each stage, where the file lays them out.
        first_layers: of the first stage alone; `last_layers` of the last.
        lighter_ends: layers by which the first and the last stage have fewer than others, which
            differ by one at most.
        recomputes: whether whole layers run their forward again.
        recomputed_layers: of each stage, the first ones; None for all of them.
        recompute_every: where each n-th layer alone does so.
        sequence_parallel: whether ranks divide the tokens between their layers' products.
        sharding: what replicas divide.
        dtype: of weights and products, where the file says it.
        autocast: whether weights are in float32, with products in `dtype`.
        precision: of products in 8 bits, where the file says it.
        offload: whether masters and the optimizer's state are in the memory of the host.
        stack: of kernels that run the operators, where that is known.
        unknown: what is not understood, with its values, as it was written.
        remarks: sentences on what is priced in another way than the trainer does it.
    """

    micro_batch: int
    global_batch: int
    tensor: int = 1
    pipeline: int = 1
    gpus: int | None = None
    machines: int | None = None
    layers: int | None = None
    length: int | None = None
    schedule: Schedule = FLUSH
    chunks: int | None = None
    layers_per_chunk: int | None = None
    stage_layers: tuple[int, ...] = ()
    first_layers: int | None = None
    last_layers: int | None = None
    lighter_ends: tuple[int, int] | None = None
    recomputes: bool = False
    recomputed_layers: int | None = None
    recompute_every: int = 1
    sequence_parallel: bool = False
    sharding: Sharding = UNSHARDED
    dtype: str | None = None
    autocast: bool = False
    precision: EightBits | None = None
    offload: bool = False
    stack: StackName | None = None
    unknown: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def replicas(self, gpus: int) -> int:
        """Return how many copies of the pipeline so many GPUs run.

        Raises:
            InputError: where they run no whole number of copies, or where these cannot share the
                global batch equally.
        """
        copies = copies_of(self.tensor, self.pipeline, gpus)
        if self.global_batch % (copies * self.micro_batch):
            raise InputError(
                f"a global batch of {self.global_batch} samples is no number of microbatches of "
                f"{self.micro_batch} for {copies} copies of the pipeline",
                hint=f"trainers want a multiple of {copies * self.micro_batch}",
            )
        return copies

    def accumulation(self, gpus: int) -> int:
        """Return how many microbatches each copy of the pipeline runs between two updates."""
        return self.global_batch // self.micro_batch // self.replicas(gpus)

    def schedule_of(self, stages: int) -> Schedule:
        """Return the schedule of so many stages: that of the file, or interleaved where workers
        have several and the file's schedule has one for each.
        """
        if stages > self.pipeline and not self.schedule.chunked:
            return INTERLEAVED
        return self.schedule

    @property
    def recomputes_some(self) -> bool:
        """Whether some layers of a stage recompute, and others do not."""
        return self.recomputes and (self.recomputed_layers, self.recompute_every) != (None, 1)

    def recomputed_of(self, blocks: int) -> bool | int:
        """Return how many of a stage's blocks run their forward again, each by itself."""
        if not self.recomputes:
            return False
        if self.recompute_every > 1:
            return blocks // self.recompute_every or False
        return min(blocks, self.recomputed_layers or blocks)

    def layers_of_stages(self, blocks: int) -> list[int]:
        """Return how many of the model's blocks each stage has, those of a worker's chunks among
        them.

        Raises:
            InputError: for stages that do not have all of the blocks, or unequally many where
                the trainer wants them equal.
        """
        if self.layers is not None and self.layers != blocks:
            raise InputError(
                f"the model has {blocks} layers, and the given run says {self.layers}",
                hint="leave their number out, or name the model that it is of",
            )

        if self.stage_layers:
            return self._laid_out(blocks)
        if self.lighter_ends is not None and self.pipeline > 1:
            return self._with_lighter_ends(blocks, self.lighter_ends)
        stages = self.pipeline * self._chunks(blocks)
        return self._around_equal(blocks, stages)

    def _laid_out(self, blocks: int) -> list[int]:
        counts = list(self.stage_layers)
        if sum(counts) != blocks or len(counts) % self.pipeline:
            raise InputError(
                f"the layout has {sum(counts)} layers in {len(counts)} stages, and the model has "
                f"{blocks}, for {self.pipeline} pipeline ranks",
                hint="name each layer of the model once, and stages for each rank",
            )

        _check_each_has_some(counts)
        return counts

    def _chunks(self, blocks: int) -> int:
        if self.chunks is not None:
            return self.chunks
        if self.layers_per_chunk is None:
            return 1
        chunks, rest = divmod(blocks, self.pipeline * self.layers_per_chunk)
        if rest or not chunks:
            raise InputError(
                f"{blocks} layers are not stages of {self.layers_per_chunk} on {self.pipeline} "
                f"pipeline ranks",
                hint="layers per stage times the pipeline ranks divide the layers",
            )

        return chunks

    def _around_equal(self, blocks: int, stages: int) -> list[int]:
        """Return equally many blocks for each stage but those that the file counts."""
        first = []
        if self.first_layers is not None:
            first.append(self.first_layers)
        last = []
        if self.last_layers is not None:
            last.append(self.last_layers)

        between = stages - len(first) - len(last)
        left = blocks - sum(first) - sum(last)
        if not _divides_equally(left, between):
            raise InputError(
                f"{left} layers cannot be split equally over {between} stages",
                hint="say how many layers the first or the last stage has, or lay all of them out",
            )

        if not between:
            return first + last
        return first + [left // between] * between + last

    def _with_lighter_ends(self, blocks: int, lighter: tuple[int, int]) -> list[int]:
        """Return stages as torchtitan's `generate_llm_fqn_per_model_part` divides layers: as if
        the model began with `lighter[0]` layers more, and ended with `lighter[1]` more.
        """
        first, last = lighter
        weighted = blocks + first + last
        if self.layers_per_chunk is None:
            stages = self.pipeline * (self.chunks or 1)
        else:
            stages = math.ceil(weighted / self.layers_per_chunk)

        if stages % self.pipeline:
            raise InputError(
                f"{blocks} layers, {self.layers_per_chunk} in each stage, are {stages} stages, "
                f"which {self.pipeline} pipeline ranks do not share equally",
                hint="give another number of layers per stage",
            )

        each, longer = divmod(weighted, stages)
        counts = [each + (number < longer) for number in range(stages)]
        counts[0] -= first
        counts[-1] -= last
        _check_each_has_some(counts)
        return counts


def copies_of(tensor: int, pipeline: int, gpus: int) -> int:
    """Return how many copies of a pipeline of groups so many GPUs run; raise InputError where that
    is no whole number.
    """
    each = tensor * pipeline
    if gpus % each:
        raise InputError(
            f"{gpus} GPUs are no copies of {pipeline} stages of {tensor} ranks, "
            f"which take {each} GPUs each",
            hint=f"give `gpus={-(-gpus // each) * each}`, or other sizes of these",
        )
    return gpus // each


def _divides_equally(layers: int, stages: int) -> bool:
    """Whether each of so many stages, which may be none, has equally many layers, and some."""
    if stages < 0 or layers < stages:
        return False
    if stages == 0:
        return layers == 0
    return layers % stages == 0


def _check_each_has_some(counts: Iterable[int]) -> None:
    for number, count in enumerate(counts):
        if count < 1:
            raise InputError(
                f"stage {number} has no layer, and such stages have no price here",
                hint="give each stage a layer",
            )


@dataclass(frozen=True)
class Batches:
    """What a file and a question say of batches, of which two numbers make the third.

    Attributes:
        file: its name.
        micro_batch: samples of a microbatch.
        accumulation: microbatches of each copy between two updates.
        global_batch: samples whose gradients make an update.
    """

    file: str
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None

    def settled(self, asked: Asked, copies: int) -> tuple[int, int]:
        """Return the samples of a microbatch, and those of an update, on so many copies of the
        pipeline.

        Raises:
            InputError: where the question says what the file says, too; where both leave the
                samples of a microbatch out; and where the numbers contradict each other.
        """
        micro = self._one_of(self.micro_batch, asked.micro_batch, "batch_size")
        whole = self._one_of(self.global_batch, asked.global_batch, "minibatch")
        if micro is None:
            micro = self._micro_of(whole, copies)

        accumulation = self.accumulation
        if whole is None:
            whole = micro * (accumulation or 1) * copies
        elif accumulation is None and whole % (micro * copies) == 0:
            accumulation = whole // (micro * copies)

        if whole != micro * (accumulation or 1) * copies:
            times = ""
            if accumulation is not None:
                times = f", {accumulation} times"
            raise InputError(
                f"{self.file}: a global batch of {whole} samples is not {copies} copies of "
                f"microbatches of {micro}{times}",
                hint="leave one of these numbers out, or ask for another number of GPUs",
            )

        return micro, whole

    def _one_of(self, in_file: int | None, asked: int | None, name: str) -> int | None:
        if in_file is None:
            return asked
        if asked is not None:
            raise InputError(
                f"`{name}={asked}` has no meaning where {self.file} says {in_file}",
                hint=f"leave out `{name}`, or the file's number",
            )
        return in_file

    def _micro_of(self, whole: int | None, copies: int) -> int:
        each = copies * (self.accumulation or 1)
        if whole is not None and self.accumulation is not None and whole % each == 0:
            return whole // each
        raise InputError(
            f"{self.file} leaves the samples of a microbatch to the script",
            hint="give what the script says, as in `batch_size=4`",
        )
