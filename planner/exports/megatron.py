"""Megatron-LM's words for a configuration: the names of its options, read from a string and
written as one.

`planner.exports.transformers` writes plans by the same names, so that what is written can be read.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import InputError, PlanError
from planner.exports.configuration import Asked, Configuration
from planner.formats.names import EightBits
from planner.options.numbers import is_count
from planner.schedule.one_stage import FLUSH
from planner.stages.sharding import UNSHARDED, ZERO_1

TENSOR = "--tensor-model-parallel-size"
CONTEXT = "--context-parallel-size"
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
FP8_FORMAT, FP8_RECIPE = "--fp8-format", "--fp8-recipe"

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
_TEXTS = (LAYOUT, GRANULARITY, METHOD, FP8_FORMAT, FP8_RECIPE)
_STAGE = re.compile(r"(?:E|L|,|t(?:\*\d+)?)*")
_STAGE_LAYERS = re.compile(r"t(?:\*(\d+))?")
_HALVES = {BFLOAT16: "bfloat16", FLOAT16: "float16"}


def read_arguments(text: str, _: Asked | None = None) -> Configuration:
    """Read options of Megatron-LM's command line; comments and line breaks may be between them.

    Raises:
        InputError: for a value that its option cannot have, or where the sizes of batches are
            missing.
    """
    options, unknown = _sorted_out(_words(text))
    counts = {name: _count(name, options[name]) for name in _COUNTS if name in options}
    for name in (MICRO_BATCH, GLOBAL_BATCH):
        if name not in counts:
            raise InputError(
                f"the string has no {name}, so nobody knows what it trains",
                hint=f"add {MICRO_BATCH} and {GLOBAL_BATCH}",
            )

    granularity = options.get(GRANULARITY)
    if granularity not in (None, "full"):
        unknown.append(f"{GRANULARITY} {granularity}")

    sharding = UNSHARDED
    if SHARDED in options:
        sharding = ZERO_1
    return Configuration(
        tensor=counts.get(TENSOR, 1),
        pipeline=counts.get(PIPELINE, 1),
        micro_batch=counts[MICRO_BATCH],
        global_batch=counts[GLOBAL_BATCH],
        layers=counts.get(LAYERS),
        length=counts.get(LENGTH),
        chunks=counts.get(CHUNKS),
        layers_per_chunk=counts.get(LAYERS_PER_CHUNK),
        stage_layers=_stage_layers(options),
        first_layers=counts.get(FIRST_LAYERS),
        last_layers=counts.get(LAST_LAYERS),
        recomputes=granularity == "full",
        recomputed_layers=_recomputed_layers(options, counts),
        sequence_parallel=SEQUENCE_PARALLEL in options,
        sharding=sharding,
        dtype=next((dtype for name, dtype in _HALVES.items() if name in options), None),
        precision=_precision(options),
        stack="megatron",
        unknown=tuple(unknown),
    )


def _stage_layers(options: Mapping[str, str]) -> tuple[int, ...]:
    """Return the layers of each stage; nothing where no layout is given."""
    if LAYOUT not in options:
        return ()
    return tuple(_layout(options[LAYOUT]))


def _recomputed_layers(options: Mapping[str, str], counts: Mapping[str, int]) -> int | None:
    """Return how many layers of a stage recompute by blocks; None where all do, or none."""
    method = options.get(METHOD, "uniform")
    if method not in ("uniform", "block"):
        raise InputError(f"{METHOD} is '{method}'", hint="Megatron knows uniform and block")
    if method == "uniform":
        return None
    return counts.get(RECOMPUTED_LAYERS)


def _precision(options: Mapping[str, str]) -> EightBits | None:
    """Return the format of products in 8 bits."""
    if FP8_FORMAT not in options:
        return None
    if options.get(FP8_RECIPE) == "mxfp8":
        return "mxfp8"
    return "fp8"


def write_arguments(run: Configuration, _: str = "") -> str:
    """Write a configuration in one line.

    Raises:
        PlanError: for what Megatron has no options for.
    """
    if run.sharding.divides_gradients or run.lighter_ends is not None or run.autocast:
        raise PlanError("Megatron's options have no form for sharded gradients or weights")
    if run.schedule is not FLUSH or run.recompute_every > 1:
        raise PlanError(f"Megatron's options have no form for {run.schedule}")
    return " ".join(_written(run))


def _written(run: Configuration) -> Iterator[str]:
    counts = {
        LAYERS: run.layers,
        LENGTH: run.length,
        TENSOR: run.tensor,
        PIPELINE: run.pipeline,
        CHUNKS: run.chunks,
        LAYERS_PER_CHUNK: run.layers_per_chunk,
        FIRST_LAYERS: run.first_layers,
        LAST_LAYERS: run.last_layers,
        MICRO_BATCH: run.micro_batch,
        GLOBAL_BATCH: run.global_batch,
    }
    yield from (f"{name} {count}" for name, count in counts.items() if count is not None)
    if run.stage_layers:
        stages = "|".join("t" * count for count in run.stage_layers)
        yield f'{LAYOUT} "E{stages}L"'

    if run.recomputes:
        method = "uniform"
        layers = 1
        if run.recomputed_layers is not None:
            method = "block"
            layers = run.recomputed_layers
        yield f"{GRANULARITY} full {METHOD} {method} {RECOMPUTED_LAYERS} {layers}"

    if run.sequence_parallel:
        yield SEQUENCE_PARALLEL
    if run.sharding.divides_anything:
        yield SHARDED
    yield from (name for name, dtype in _HALVES.items() if dtype == run.dtype)
    if run.precision is not None:
        yield f"{FP8_FORMAT} hybrid"
    if run.precision == "mxfp8":
        yield f"{FP8_RECIPE} mxfp8"


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
        values = []
        if value:
            values.append(value)

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
