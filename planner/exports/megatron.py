"""Megatron-LM's words for a configuration: the names of its options, read from a string.

`planner.exports.transformers` writes plans by the same names, so that what is written can be read.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import InputError
from planner.options.numbers import is_count

TENSOR = "--tensor-model-parallel-size"
PIPELINE = "--pipeline-model-parallel-size"
MICRO_BATCH = "--micro-batch-size"
GLOBAL_BATCH = "--global-batch-size"
LAYERS = "--num-layers"
LENGTH = "--seq-length"
LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYOUT = "--pipeline-model-parallel-layout"
FIRST_LAYERS = "--decoder-first-pipeline-num-layers"
LAST_LAYERS = "--decoder-last-pipeline-num-layers"
GRANULARITY = "--recompute-granularity"
METHOD = "--recompute-method"
RECOMPUTED_LAYERS = "--recompute-num-layers"
SEQUENCE_PARALLEL = "--sequence-parallel"
SHARDED = "--use-distributed-optimizer"
BFLOAT16, FLOAT16 = "--bf16", "--fp16"

_COUNTS = (
    TENSOR,
    PIPELINE,
    MICRO_BATCH,
    GLOBAL_BATCH,
    LAYERS,
    LENGTH,
    LAYERS_PER_CHUNK,
    CHUNKS,
    FIRST_LAYERS,
    LAST_LAYERS,
    RECOMPUTED_LAYERS,
)
_SWITCHES = (SEQUENCE_PARALLEL, SHARDED, BFLOAT16, FLOAT16)
_TEXTS = (LAYOUT, GRANULARITY, METHOD)
_STAGE = re.compile(r"(?:E|L|,|t(?:\*\d+)?)*")
_STAGE_LAYERS = re.compile(r"t(?:\*(\d+))?")
_HALVES = {BFLOAT16: "bfloat16", FLOAT16: "float16"}


@dataclass(frozen=True)
class MegatronRun:
    """What a string of Megatron's options says, as far as it is understood.

    Attributes:
        tensor: ranks that divide each layer.
        pipeline: workers, or groups of them, that a pipeline has.
        micro_batch: samples of a microbatch.
        global_batch: samples whose gradients make an update.
        layers: of the model, where the string says how many.
        length: tokens of a sample, likewise.
        chunks: stages on each worker, where the string says how many.
        layers_per_chunk: or how many layers each of these has.
        stage_layers: of each stage, where the string has a layout.
        first_layers: of the first stage alone; `last_layers` of the last.
        recomputes: whether whole layers run their forward again.
        recomputed_layers: of each stage, the first ones; None for all of them.
        sequence_parallel: whether ranks divide the tokens between their layers' products.
        sharded: whether replicas divide the optimizer's state.
        dtype: of weights and products, where the string says it.
        unknown: the options that are not understood, with their values, as they were written.
    """

    tensor: int
    pipeline: int
    micro_batch: int
    global_batch: int
    layers: int | None = None
    length: int | None = None
    chunks: int | None = None
    layers_per_chunk: int | None = None
    stage_layers: tuple[int, ...] = ()
    first_layers: int | None = None
    last_layers: int | None = None
    recomputes: bool = False
    recomputed_layers: int | None = None
    sequence_parallel: bool = False
    sharded: bool = False
    dtype: str | None = None
    unknown: tuple[str, ...] = ()

    def replicas(self, gpus: int) -> int:
        """Return how many copies of the pipeline so many GPUs run.

        Raises:
            InputError: where they run no whole number of copies, or where these cannot share the
                global batch equally.
        """
        each = self.tensor * self.pipeline
        if gpus % each:
            raise InputError(
                f"{gpus} GPUs are no copies of {self.pipeline} stages of {self.tensor} ranks, "
                f"which take {each} GPUs each",
                hint=f"give `gpus={-(-gpus // each) * each}`, or other sizes in `megatron`",
            )
        copies = gpus // each
        if self.global_batch % (copies * self.micro_batch):
            raise InputError(
                f"a global batch of {self.global_batch} samples is no number of microbatches of "
                f"{self.micro_batch} for {copies} copies of the pipeline",
                hint=f"Megatron wants a multiple of {copies * self.micro_batch}",
            )
        return copies

    def layers_of_stages(self, blocks: int) -> list[int]:
        """Return how many of the model's blocks each stage has, those of a worker's chunks among
        them.

        Raises:
            InputError: for stages that do not have all of the blocks, or unequally many where
                Megatron wants them equal.
        """
        if self.layers is not None and self.layers != blocks:
            raise InputError(
                f"the model has {blocks} layers, and `megatron` says {self.layers}",
                hint=f"leave {LAYERS} out, or name the model that it is of",
            )
        if self.stage_layers:
            return self._laid_out(blocks)
        stages = self.pipeline * self._chunks(blocks)
        return self._around_equal(blocks, stages)

    def _laid_out(self, blocks: int) -> list[int]:
        counts = list(self.stage_layers)
        if sum(counts) != blocks or len(counts) % self.pipeline:
            raise InputError(
                f"{LAYOUT} has {sum(counts)} layers in {len(counts)} stages, and the model has "
                f"{blocks}, for {self.pipeline} pipeline ranks",
                hint="write a t for each layer of the model, and stages for each rank",
            )
        if 0 in counts:
            raise InputError(
                f"stage {counts.index(0)} of {LAYOUT} has no layer, and such stages have no price "
                f"here",
                hint="give each stage a layer",
            )
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
                hint=f"{LAYERS_PER_CHUNK} times the pipeline ranks divides the layers",
            )
        return chunks

    def _around_equal(self, blocks: int, stages: int) -> list[int]:
        """Return equally many blocks for each stage but those that the string counts."""
        first = [] if self.first_layers is None else [self.first_layers]
        last = [] if self.last_layers is None else [self.last_layers]
        between = stages - len(first) - len(last)
        left = blocks - sum(first) - sum(last)
        if between < 0 or left < between or (between and left % between) or (left and not between):
            raise InputError(
                f"{left} layers are not divided equally over {between} stages",
                hint=f"Megatron takes {FIRST_LAYERS}, {LAST_LAYERS} or {LAYOUT} for others",
            )
        middle = [left // between] * between if between else []
        return [*first, *middle, *last]


def read_arguments(text: str) -> MegatronRun:
    """Read options of Megatron-LM's command line; comments and line breaks may be between them.

    Raises:
        InputError: for a value that its option cannot have, or where the sizes of batches are
            missing.
    """
    found, unknown = _sorted_out(_words(text))
    counts = {name: _count(name, found[name]) for name in _COUNTS if name in found}
    for name in (MICRO_BATCH, GLOBAL_BATCH):
        if name not in counts:
            raise InputError(
                f"the string has no {name}, so nobody knows what it trains",
                hint=f"add {MICRO_BATCH} and {GLOBAL_BATCH}",
            )

    granularity = found.get(GRANULARITY)
    whole_layers = granularity == "full"
    if granularity not in (None, "full"):
        unknown.append(f"{GRANULARITY} {granularity}")
    method = found.get(METHOD, "uniform")
    if method not in ("uniform", "block"):
        raise InputError(f"{METHOD} is '{method}'", hint="Megatron knows uniform and block")
    return MegatronRun(
        tensor=counts.get(TENSOR, 1),
        pipeline=counts.get(PIPELINE, 1),
        micro_batch=counts[MICRO_BATCH],
        global_batch=counts[GLOBAL_BATCH],
        layers=counts.get(LAYERS),
        length=counts.get(LENGTH),
        chunks=counts.get(CHUNKS),
        layers_per_chunk=counts.get(LAYERS_PER_CHUNK),
        stage_layers=tuple(_layout(found[LAYOUT])) if LAYOUT in found else (),
        first_layers=counts.get(FIRST_LAYERS),
        last_layers=counts.get(LAST_LAYERS),
        recomputes=whole_layers,
        recomputed_layers=counts.get(RECOMPUTED_LAYERS) if method == "block" else None,
        sequence_parallel=SEQUENCE_PARALLEL in found,
        sharded=SHARDED in found,
        dtype=next((dtype for name, dtype in _HALVES.items() if name in found), None),
        unknown=tuple(unknown),
    )


def _words(text: str) -> list[str]:
    """Return the words of a string, or of a file that was pasted, without comments."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(
            f"`megatron` cannot be read: {error}", hint="close the quotation marks"
        ) from None


def _sorted_out(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that are understood, with their values, and the others as they were
    written.
    """
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in _options(words):
        if name in (*_COUNTS, *_TEXTS, *_SWITCHES):
            found[name] = value
        else:
            unknown.append(f"{name} {value}".strip())
    return found, unknown


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with the words up to the next one, "--name value" or "--name=value"."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if not word.startswith("--"):
            if name is None:
                raise InputError(
                    f"`megatron` begins with '{word}', which is no option of Megatron",
                    hint=f"give options such as {TENSOR} 8",
                )
            values.append(word)
            continue
        if name is not None:
            yield name, " ".join(values)
        name, _, value = word.partition("=")
        values = [value] if value else []
    if name is not None:
        yield name, " ".join(values)


def _count(name: str, value: str) -> int:
    if not is_count(value) or int(value) < 1:
        raise InputError(f"{name} is '{value}', not a number of 1 or more", hint=f"as in {name} 8")
    return int(value)


def _layout(text: str) -> Iterator[int]:
    """Yield the transformer layers of each stage of a layout such as "Ett|t*3|tL".

    E is the embedding, t a layer, L the loss, and | stands between stages.
    """
    for stage in text.split("|"):
        if not _STAGE.fullmatch(stage):
            raise InputError(
                f"the stage '{stage}' of {LAYOUT} has something else than E, t and L",
                hint='as in "Ett|ttt|ttL", with a t for each layer',
            )
        yield sum(int(times or 1) for times in _STAGE_LAYERS.findall(stage))
