"""torchtitan's words for a configuration: the sections of its TOML files, read and written.

Names and defaults are those of `torchtitan/config/job_config.py` up to January 2026. Later ones are
given to functions of its `config_registry`, for which `planner.export` writes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import InputError, PlanError
from planner.exports.configuration import Asked, Batches, Configuration, copies_of
from planner.exports.settings import Settings, parse_toml, parsed
from planner.formats.names import EightBits, StackName
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH, GPIPE
from planner.schedule.schedule import Schedule
from planner.schedule.zb_v import ZB_V
from planner.stages.sharding import UNSHARDED, ZERO_2, ZERO_3, Sharding

_SCHEDULES: Mapping[str, Schedule] = {
    "1F1B": FLUSH,
    "GPipe": GPIPE,
    "Interleaved1F1B": INTERLEAVED,
    "ZBVZeroBubble": ZB_V,
}
_DTYPES = {"bfloat16": "bfloat16", "float32": "float32"}
_CONVERTERS: Mapping[str, EightBits] = {"float8": "fp8", "mx": "mxfp8"}
_RESHARDS = {"default": None, "always": True, "never": False}
_RECOMPUTES = {"none": False, "full": True, "selective": True, "memory_budget": False}
# What changes neither the time of a step nor the memory of the model.
_NEUTRAL = (
    *("job.*", "metrics.*", "lr_scheduler.*", "checkpoint.*", "validation.*", "comm.*"),
    *("experimental.*", "debug.*", "model.*path", "model.name", "model.flavor"),
    *("optimizer.lr", "optimizer.eps", "optimizer.beta*", "optimizer.weight_decay"),
    *("training.dataset*", "training.steps", "training.max_norm", "training.seed"),
    *("training.deterministic", "training.debug*", "training.gc_*", "training.dataloader.*"),
    *("compile.components", "activation_checkpoint.early_stop", "activation_checkpoint.debug"),
    *("profiling.*", "memory_estimation.*", "fault_tolerance.*", "hf_transformers.*"),
)
_PRICED: Mapping[str, object] = {
    "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.context_parallel_rotate_method": "allgather",
    "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    "training.mixed_precision_reduce": "float32",
}


def read_torchtitan(text: str, asked: Asked) -> Configuration:
    """Read a TOML file of torchtitan for so many GPUs.

    Raises:
        InputError: for what is no TOML, for a value that its key cannot have, and for degrees and
            batches that do not divide.
    """
    said = parsed(asked.file.name, "TOML", parse_toml, text)
    tensor = said.count("parallelism.tensor_parallel_degree") or 1
    pipeline = said.count("parallelism.pipeline_parallel_degree") or 1
    repeated = said.count("parallelism.data_parallel_replicate_degree") or 1
    shards = said.count("parallelism.data_parallel_shard_degree", least=-1)
    if shards in (None, -1):
        shards = _left_over(asked, tensor * pipeline * repeated)
    assert shards is not None
    gpus = tensor * pipeline * repeated * shards
    if asked.gpus not in (None, gpus):
        raise InputError(
            f"{said.file} is for {gpus} GPUs, and the question has {asked.gpus}",
            hint=f"give `gpus={gpus}`, or data_parallel_shard_degree = -1",
        )

    micro, whole = _batches(said, asked, copies_of(tensor, pipeline, gpus), pipeline)
    remarks = []
    if pipeline > 1 and whole > (said.count("training.local_batch_size") or 8) * repeated * shards:
        remarks.append(
            "torchtitan drains the pipeline after each local batch, and this is the price of one "
            "that drains once for each update"
        )

    schedule = said.choice("parallelism.pipeline_parallel_schedule", _SCHEDULES) or FLUSH
    if pipeline == 1:
        schedule = FLUSH

    recomputes, every = _recomputation(said)
    stack: StackName = "eager"
    if said.switch("compile.enable"):
        stack = "compiled"
    autocast = shards == 1 and repeated * tensor * pipeline > 1
    return Configuration(
        tensor=tensor,
        pipeline=pipeline,
        gpus=gpus,
        micro_batch=micro,
        global_batch=whole,
        length=said.count("training.seq_len"),
        schedule=schedule,
        chunks=_chunks(said, schedule, pipeline),
        layers_per_chunk=said.count("parallelism.pipeline_parallel_layers_per_stage"),
        stage_layers=_stage_layers(said),
        lighter_ends=_lighter_ends(said),
        recomputes=recomputes,
        recompute_every=every,
        sequence_parallel=tensor > 1,
        sharding=_sharding(said, repeated, shards, pipeline),
        dtype=_dtype(said),
        autocast=autocast and _dtype(said) == "bfloat16",
        precision=_precision(said),
        stack=stack,
        unknown=said.left((*_NEUTRAL, *_idle(said)), _PRICED),
        remarks=tuple(remarks),
    )


def _idle(said: Settings) -> Sequence[str]:
    """Return the keys that are of no effect: those of float8 where no converter makes any."""
    if said.values.get("model.converters", ()):
        return ()
    return ("quantize.*",)


def _left_over(asked: Asked, others: int) -> int:
    """Return over how many GPUs weights are sharded where the file leaves that open."""
    if asked.gpus is None:
        raise InputError(
            f"{asked.file.name} leaves the number of GPUs open",
            hint="give `gpus=64`, or a data_parallel_shard_degree",
        )
    return copies_of(others, 1, asked.gpus)


def _batches(said: Settings, asked: Asked, copies: int, pipeline: int) -> tuple[int, int]:
    """Return the samples of a microbatch and of an update; a pipeline divides its local batch into
    microbatches.
    """
    local = said.count("training.local_batch_size") or said.count("training.batch_size") or 8

    whole = said.count("training.global_batch_size", least=-1)
    if whole is None or whole <= 0:
        whole = local * copies

    size = said.count("parallelism.pipeline_parallel_microbatch_size") or 1
    if pipeline == 1:
        size = local

    if whole % (local * copies) or local % size:
        raise InputError(
            f"{said.file}: a global batch of {whole} samples is no number of local batches of "
            f"{local} on {copies} copies, in microbatches of {size}",
            hint="change global_batch_size, local_batch_size or pipeline_parallel_microbatch_size",
        )

    return Batches(said.file, size, None, whole).settled(asked, copies)


def _recomputation(said: Settings) -> tuple[bool, int]:
    """Return whether layers recompute, and that every n-th does; single operations are left out,
    and named as not understood.
    """
    mode = said.get("activation_checkpoint.mode")
    recomputes = said.choice("activation_checkpoint.mode", _RECOMPUTES)
    if mode != "selective":
        if mode == "memory_budget":
            said.understood.discard("activation_checkpoint.mode")
        if mode != "none":
            said.get("activation_checkpoint.selective_ac_option")
        return bool(recomputes), 1

    every = said.values.get("activation_checkpoint.selective_ac_option", "2")
    if every == "op":
        return False, 1
    return True, said.count("activation_checkpoint.selective_ac_option") or 2


def _chunks(said: Settings, schedule: Schedule, pipeline: int) -> int | None:
    """Return torchtitan's stages on each worker: two where the schedule has several."""
    if pipeline == 1:
        return None
    if schedule.chunked:
        return 2
    return 1


def _stage_layers(said: Settings) -> tuple[int, ...]:
    parts = said.get("parallelism.module_fqns_per_model_part")
    if parts is None or parts == ():
        return ()
    if not isinstance(parts, tuple) or not all(isinstance(part, list) for part in parts):
        raise said.wrong(
            "parallelism.module_fqns_per_model_part",
            "no list of lists of modules",
            'as in [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]',
        )

    return tuple(sum(1 for module in part if str(module).startswith("layers.")) for part in parts)


def _lighter_ends(said: Settings) -> tuple[int, int]:
    """Return by how many layers the first and the last stage are lighter: by default by one."""
    first = said.count("parallelism.pipeline_parallel_first_stage_less_layers", least=0)
    last = said.count("parallelism.pipeline_parallel_last_stage_less_layers", least=0)
    if first is None:
        first = 1
    if last is None:
        last = 1
    return first, last


def _sharding(said: Settings, repeated: int, shards: int, pipeline: int) -> Sharding:
    """Return what `fully_shard` divides: weights are kept between forward and backward where it
    does not reshard them, by default those of a pipeline.
    """
    reshards = said.choice("parallelism.fsdp_reshard_after_forward", _RESHARDS)
    if shards == 1:
        return UNSHARDED
    if reshards is None:
        reshards = pipeline == 1

    sharding = ZERO_2
    if reshards:
        sharding = ZERO_3
    if repeated == 1:
        return sharding
    return sharding.in_groups(shards)


def _dtype(said: Settings) -> str | None:
    """Return the type of products: weights in it alone are named as not understood."""
    if said.values.get("training.dtype") == "float32":
        said.get("training.dtype")
    return said.choice("training.mixed_precision_param", _DTYPES) or "bfloat16"


def _precision(said: Settings) -> EightBits | None:
    """Return the format of products in 8 bits, where a converter makes linear layers have them."""
    converters = said.values.get("model.converters", ())
    for name, precision in _CONVERTERS.items():
        if converters == (name,):
            said.get("model.converters")
            return precision
    return None


def write_torchtitan(run: Configuration, _: str = "") -> str:
    """Write the keys of a TOML file that say what the configuration does; others stay as they are.

    Raises:
        PlanError: for what torchtitan has no keys for.
    """
    if run.sharding.divides_optimizer_alone:
        raise PlanError("torchtitan has no form for a sharded optimizer's state alone")
    if run.recomputed_layers is not None:
        raise PlanError("torchtitan recomputes all layers, every n-th or none")
    names = {schedule: name for name, schedule in _SCHEDULES.items()}
    if run.schedule not in names:
        raise PlanError(f"torchtitan has no form for {run.schedule}")
    if run.gpus is None:
        raise PlanError("the configuration does not say for how many GPUs it is")

    lines = []
    for section, values in _sections(run, names[run.schedule]).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines.append("")

    return "\n".join(lines).strip()


def _sections(run: Configuration, schedule: str) -> Mapping[str, Mapping[str, object]]:
    """Return the keys by section; `schedule` by torchtitan's name."""
    assert run.gpus is not None
    return {
        "training": dict(_training(run, run.gpus)),
        "parallelism": dict(_parallelism(run, run.replicas(run.gpus), schedule)),
        "activation_checkpoint": _recomputation_keys(run),
    }


def _training(run: Configuration, gpus: int) -> Iterator[tuple[str, object]]:
    local = run.micro_batch
    if run.pipeline > 1:
        local *= run.accumulation(gpus)
    yield "local_batch_size", local
    yield "global_batch_size", run.global_batch
    if run.length is not None:
        yield "seq_len", run.length


def _recomputation_keys(run: Configuration) -> Mapping[str, object]:
    if run.recompute_every > 1:
        return {"mode": "selective", "selective_ac_option": str(run.recompute_every)}
    if run.recomputes:
        return {"mode": "full"}
    return {"mode": "none"}


def _parallelism(run: Configuration, copies: int, schedule: str) -> Iterator[tuple[str, object]]:
    shards = 1
    if run.sharding.divides_anything:
        shards = run.sharding.group or copies
    yield "data_parallel_replicate_degree", copies // shards
    yield "data_parallel_shard_degree", shards
    if shards > 1 and run.sharding.divides_weights:
        yield "fsdp_reshard_after_forward", "always"
    if shards > 1 and not run.sharding.divides_weights:
        yield "fsdp_reshard_after_forward", "never"

    yield "tensor_parallel_degree", run.tensor
    yield "pipeline_parallel_degree", run.pipeline
    if run.pipeline > 1:
        yield from _pipeline_keys(run, schedule)


def _pipeline_keys(run: Configuration, schedule: str) -> Iterator[tuple[str, object]]:
    yield "pipeline_parallel_schedule", schedule
    yield "pipeline_parallel_microbatch_size", run.micro_batch
    if run.stage_layers:
        yield "module_fqns_per_model_part", _modules(run.stage_layers)

    first, last = run.lighter_ends or (0, 0)
    yield "pipeline_parallel_first_stage_less_layers", first
    yield "pipeline_parallel_last_stage_less_layers", last
    if run.layers_per_chunk is not None:
        yield "pipeline_parallel_layers_per_stage", run.layers_per_chunk


def _modules(counts: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of each stage by torchtitan's names."""
    parts: list[list[str]] = []
    begin = 0
    for count in counts:
        parts.append([f"layers.{number}" for number in range(begin, begin + count)])
        begin += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts
