"""accelerate's words for a configuration: the YAML file of `accelerate config`, read and written.

Names and defaults are those of `accelerate/commands/config`: its sections on FSDP, DeepSpeed,
Megatron-LM and N-dimensional parallelism. Samples per forward are in the script, not in this file.
"""

import json
from collections.abc import Mapping
from typing import Any

from planner.errors import InputError, PlanError
from planner.exports import deepspeed
from planner.exports.configuration import Asked, Batches, Configuration, copies_of
from planner.exports.deepspeed import zero_stage
from planner.exports.settings import Settings, parsed, parsed_yaml, text_of
from planner.formats.files import parse_json, replace
from planner.formats.names import StackName
from planner.schedule.one_stage import FLUSH
from planner.stages.sharding import UNSHARDED, ZERO_1, ZERO_2, ZERO_3, Sharding

DDP = "MULTI_GPU"
FSDP = "FSDP"
DEEPSPEED = "DEEPSPEED"
MEGATRON = "MEGATRON_LM"
_WAYS = {each: each for each in ("NO", "False", "no", DDP, FSDP, DEEPSPEED, MEGATRON)}
_PRECISIONS = {
    "no": "float32",
    "NO": "float32",
    "False": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "bfloat16",
}
_WORDS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
# By torch's names and numbers of a ShardingStrategy: what is divided, whether servers repeat it.
_STRATEGIES: Mapping[str, tuple[Sharding, bool]] = {
    "FULL_SHARD": (ZERO_3, False),
    "1": (ZERO_3, False),
    "SHARD_GRAD_OP": (ZERO_2, False),
    "2": (ZERO_2, False),
    "NO_SHARD": (UNSHARDED, False),
    "3": (UNSHARDED, False),
    "HYBRID_SHARD": (ZERO_3, True),
    "4": (ZERO_3, True),
    "HYBRID_SHARD_ZERO2": (ZERO_2, True),
    "5": (ZERO_2, True),
}
_NEUTRAL = (
    *("compute_environment", "debug", "machine_rank", "main_*", "rdzv_*", "same_network"),
    *("tpu_*", "gpu_ids", "commands", "command_file", "enable_cpu_affinity", "mpirun_config.*"),
    *("deepspeed_config.zero3_*", "deepspeed_config.deepspeed_multinode_launcher"),
    *("deepspeed_config.deepspeed_hostfile", "deepspeed_config.deepspeed_*clusion_filter"),
    *("deepspeed_config.gradient_clipping", "megatron_lm_config.*gradient_clipping"),
    *("fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_cpu_ram_efficient_loading"),
    *("fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_use_orig_params"),
    *("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_ignored_*"),
)
_PRICED: Mapping[str, object] = {
    "use_cpu": False,
    "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE",
    "parallelism_config.parallelism_config_cp_size": 1,
    "parallelism_config.parallelism_config_cp_comm_strategy": "allgather",
    "megatron_lm_config.megatron_lm_use_custom_fsdp": False,
}


def read_accelerate(text: str, asked: Asked) -> Configuration:
    """Read a file of accelerate, for the number of GPUs that it or the question says.

    Raises:
        InputError: for what is no YAML, for a value that its key cannot have, and for degrees and
            batches that do not divide.
    """
    said = parsed_yaml(asked.file.name, text)
    way = said.choice("distributed_type", _WAYS) or "NO"
    asked = replace(asked, gpus=_gpus(said, asked))
    match way:
        case "DEEPSPEED":
            run = _deepspeed(said, asked)
        case "MEGATRON_LM":
            run = _megatron(said, asked)
        case "FSDP":
            run = _fsdp(said, asked)
        case _:
            run = _plain(said, asked)

    return replace(
        run,
        machines=said.count("num_machines"),
        stack=_stack(said, run),
        unknown=(*run.unknown, *_left(said, way)),
    )


def _gpus(said: Settings, asked: Asked) -> int:
    gpus = said.count("num_processes", least=-1)
    if gpus is None or gpus < 1:
        gpus = asked.gpus
    if gpus is None:
        raise InputError(
            f"{said.file} does not say on how many GPUs it runs",
            hint="give `gpus=8`, or `servers` and `gpus_per_server`",
        )

    if asked.gpus not in (None, gpus):
        raise InputError(
            f"{said.file} is for {gpus} processes, and the question has {asked.gpus} GPUs",
            hint=f"give `gpus={gpus}`, or change num_processes",
        )

    return gpus


def _left(said: Settings, way: str) -> tuple[str, ...]:
    """Return what is not understood; sections that another way reads are of no effect."""
    others = {FSDP: "fsdp_config.*", DEEPSPEED: "deepspeed_config.*", MEGATRON: "megatron_lm*"}
    idle = [pattern for other, pattern in others.items() if other != way]
    return said.left((*_NEUTRAL, *idle), _PRICED)


def _stack(said: Settings, run: Configuration) -> StackName | None:
    """Return what runs the operators: Megatron's own kernels, or PyTorch's, compiled or not."""
    backend = said.values.get("dynamo_config.dynamo_backend")
    if said.values.get("distributed_type") == MEGATRON:
        return "megatron"
    if isinstance(backend, str) and backend.lower() == "inductor":
        said.get("dynamo_config.dynamo_backend")
        return "compiled"
    return run.stack or "eager"


def _precision(said: Settings) -> str | None:
    """Return the type of products; half of it as FP8 is named as not understood."""
    word = said.values.get("mixed_precision")
    dtype = said.choice("mixed_precision", _PRECISIONS)
    if word == "fp8":
        said.understood.discard("mixed_precision")
    return dtype


def _batches(said: Settings, asked: Asked, copies: int) -> tuple[int, int]:
    return Batches(said.file).settled(asked, copies)


def _plain(said: Settings, asked: Asked) -> Configuration:
    """Read data parallelism of PyTorch, whose weights stay in float32."""
    assert asked.gpus is not None
    dtype = _precision(said)
    micro, whole = _batches(said, asked, asked.gpus)
    return Configuration(
        gpus=asked.gpus,
        micro_batch=micro,
        global_batch=whole,
        recomputes=bool(asked.recomputes),
        dtype=dtype,
        autocast=dtype != "float32",
    )


def _fsdp(said: Settings, asked: Asked) -> Configuration:
    """Read FSDP, beside layers that ranks divide where the file has a section on that."""
    assert asked.gpus is not None
    section = "parallelism_config.parallelism_config_"
    tensor = said.count(f"{section}tp_size") or 1
    repeated = said.count(f"{section}dp_replicate_size")
    shards = said.count(f"{section}dp_shard_size")
    copies = copies_of(tensor, 1, asked.gpus)
    micro, whole = _batches(said, asked, copies)
    recomputes = said.switch("fsdp_config.fsdp_activation_checkpointing")
    if asked.recomputes is not None:
        recomputes = asked.recomputes
    sharding = _strategy(said, copies)
    if repeated is not None and shards is not None:
        sharding = _in_groups(sharding, shards, copies)
    return Configuration(
        tensor=tensor,
        gpus=asked.gpus,
        micro_batch=micro,
        global_batch=whole,
        recomputes=bool(recomputes),
        sequence_parallel=tensor > 1,
        sharding=sharding,
        dtype=_precision(said),
    )


def _strategy(said: Settings, copies: int) -> Sharding:
    """Return what FSDP divides; nothing on one copy."""
    version = said.count("fsdp_config.fsdp_version") or 1
    if version == 1:
        sharding = _first_version(said, copies)
    else:
        sharding = _second_version(said)

    if copies == 1:
        return UNSHARDED
    return sharding


def _first_version(said: Settings, copies: int) -> Sharding:
    """Return what FSDP divides by its strategy."""
    said.get("fsdp_config.fsdp_reshard_after_forward")
    key = "fsdp_config.fsdp_sharding_strategy"
    sharding, in_servers = said.choice(key, _STRATEGIES) or (ZERO_3, False)
    machines = said.count("num_machines") or 1
    if in_servers and machines > 1:
        return sharding.in_groups(copies // machines)
    return sharding


def _second_version(said: Settings) -> Sharding:
    """Return what FSDP divides by whether it reshards after the forward."""
    if said.switch("fsdp_config.fsdp_reshard_after_forward") is False:
        return ZERO_2
    return ZERO_3


def _in_groups(sharding: Sharding, shards: int, copies: int) -> Sharding:
    if shards == 1:
        return UNSHARDED
    if shards >= copies:
        return sharding.in_groups(0)
    return sharding.in_groups(shards)


def _megatron(said: Settings, asked: Asked) -> Configuration:
    assert asked.gpus is not None
    section = "megatron_lm_config.megatron_lm_"
    tensor = said.count(f"{section}tp_degree") or 1
    pipeline = said.count(f"{section}pp_degree") or 1
    copies = copies_of(tensor, pipeline, asked.gpus)
    batches = Batches(said.file, accumulation=said.count(f"{section}num_micro_batches"))
    micro, whole = batches.settled(asked, copies)
    sharding = UNSHARDED
    if said.switch(f"{section}use_distributed_optimizer") and copies > 1:
        sharding = ZERO_1

    # Megatron recomputes attention alone there, which is named as not understood.
    if not said.values.get(f"{section}recompute_activations"):
        said.switch(f"{section}recompute_activations")
    return Configuration(
        tensor=tensor,
        pipeline=pipeline,
        gpus=asked.gpus,
        micro_batch=micro,
        global_batch=whole,
        recomputes=bool(asked.recomputes),
        sequence_parallel=bool(said.switch(f"{section}sequence_parallelism")) and tensor > 1,
        sharding=sharding,
        dtype=_precision(said),
    )


def _deepspeed(said: Settings, asked: Asked) -> Configuration:
    """Read DeepSpeed's part: of a file of its own, or of the keys that stand for it."""
    dtype = _precision(said)
    own = said.get("deepspeed_config.deepspeed_config_file")
    if own is not None:
        content = parsed(str(own), "JSON", parse_json, text_of(asked.file.parent / str(own)))
        run = deepspeed.configuration_of(content, asked)
        return replace(run, dtype=run.dtype or dtype)

    assert asked.gpus is not None
    sharding = zero_stage(said, "deepspeed_config.zero_stage") or ZERO_2
    if asked.gpus == 1:
        sharding = UNSHARDED

    section = "deepspeed_config."
    offload = said.values.get(f"{section}offload_optimizer_device") == "cpu"
    if offload:
        said.get(f"{section}offload_optimizer_device")
    batches = Batches(said.file, accumulation=said.count(f"{section}gradient_accumulation_steps"))
    micro, whole = batches.settled(asked, asked.gpus)
    return Configuration(
        gpus=asked.gpus,
        micro_batch=micro,
        global_batch=whole,
        recomputes=bool(asked.recomputes),
        sharding=sharding,
        dtype=dtype,
        offload=offload,
    )


def write_accelerate(run: Configuration, like: str = "") -> str:
    """Write the keys of a YAML file that say what the configuration does, by the part of
    accelerate that a given file uses; others stay as they are.

    Raises:
        PlanError: for what that part has no keys for.
    """
    if run.gpus is None:
        raise PlanError("the configuration does not say for how many GPUs it is")
    said = parsed_yaml("the given file", like)
    way = str(said.values.get("distributed_type", DDP))
    content: dict[str, Any] = {}
    match way:
        case "DEEPSPEED":
            content = {"distributed_type": DEEPSPEED, "deepspeed_config": _as_deepspeed(run)}
        case "MEGATRON_LM":
            content = {"distributed_type": MEGATRON, "megatron_lm_config": _as_megatron(run)}
        case _:
            content = _as_fsdp(run, said)

    content["num_processes"] = run.gpus
    if run.machines is not None:
        content["num_machines"] = run.machines
    if run.dtype is not None:
        content["mixed_precision"] = _WORDS[run.dtype]
    return "\n".join(_yaml_lines(content))


def _as_deepspeed(run: Configuration) -> dict[str, Any]:
    assert run.gpus is not None
    zero = deepspeed.sections_of(run)["zero_optimization"]
    if run.tensor > 1 or run.sharding.group:
        raise PlanError("accelerate's keys have no form for groups; DeepSpeed's file has")
    content: dict[str, Any] = {
        "zero_stage": zero["stage"],
        "gradient_accumulation_steps": run.accumulation(run.gpus),
    }
    if run.offload:
        content["offload_optimizer_device"] = zero["offload_optimizer"]["device"]
    return content


def _as_megatron(run: Configuration) -> dict[str, Any]:
    assert run.gpus is not None
    if run.sharding.divides_gradients or run.schedule is not FLUSH or run.recomputes:
        raise PlanError("accelerate's section on Megatron has no form for this")
    if (run.chunks or 1) > 1 or run.stage_layers:
        raise PlanError("accelerate's section on Megatron has equal stages, one on each worker")
    return {
        "megatron_lm_tp_degree": run.tensor,
        "megatron_lm_pp_degree": run.pipeline,
        "megatron_lm_num_micro_batches": run.accumulation(run.gpus),
        "megatron_lm_sequence_parallelism": run.sequence_parallel,
        "megatron_lm_use_distributed_optimizer": run.sharding.divides_anything,
        "megatron_lm_recompute_activations": False,
    }


def _as_fsdp(run: Configuration, said: Settings) -> dict[str, Any]:
    """Return the keys of FSDP, or of plain data parallelism where nothing is sharded."""
    if run.pipeline > 1 or run.recomputes_some:
        raise PlanError("accelerate's section on FSDP has no form for a pipeline")
    if run.sharding.divides_optimizer_alone:
        raise PlanError("FSDP has no form for a sharded optimizer's state alone")

    if run.tensor == 1 and not run.sharding.divides_anything:
        if not run.autocast and run.dtype != "float32":
            raise PlanError("data parallelism of PyTorch keeps weights in float32")
        return {"distributed_type": DDP}

    second = said.values.get("fsdp_config.fsdp_version") in (2, "2")
    if second or run.tensor > 1:
        return _as_second_version(run)
    return _as_first_version(run)


def _as_second_version(run: Configuration) -> dict[str, Any]:
    """Return the keys of FSDP's second version, and the degrees beside it."""
    assert run.gpus is not None
    copies = run.replicas(run.gpus)
    shards = 1
    if run.sharding.divides_anything:
        shards = run.sharding.group or copies
    return {
        "distributed_type": FSDP,
        "fsdp_config": {
            "fsdp_activation_checkpointing": run.recomputes,
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": run.sharding.divides_weights,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": copies // shards,
            "parallelism_config_dp_shard_size": shards,
            "parallelism_config_tp_size": run.tensor,
        },
    }


def _as_first_version(run: Configuration) -> dict[str, Any]:
    """Return the keys of FSDP's first version."""
    return {
        "distributed_type": FSDP,
        "fsdp_config": {
            "fsdp_activation_checkpointing": run.recomputes,
            "fsdp_sharding_strategy": _strategy_name(run),
        },
    }


def _strategy_name(run: Configuration) -> str:
    assert run.gpus is not None
    if not run.sharding.group:
        if run.sharding.divides_weights:
            return "FULL_SHARD"
        return "SHARD_GRAD_OP"

    copies = run.replicas(run.gpus)
    if run.machines in (None, 1) or run.sharding.group * (run.machines or 1) != copies:
        raise PlanError("FSDP's groups are whole servers")
    if run.sharding.divides_weights:
        return "HYBRID_SHARD"
    return "HYBRID_SHARD_ZERO2"


def _yaml_lines(content: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:")
            lines += _yaml_lines(value, f"{indent}  ")
        else:
            lines.append(f"{indent}{key}: {_yaml_value(value)}")
    return lines


def _yaml_value(value: object) -> str:
    if value == "no":  # which would be false
        return "'no'"
    return json.dumps(value).strip('"')
