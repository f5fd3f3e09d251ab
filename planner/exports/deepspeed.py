"""DeepSpeed's words for a configuration: its JSON file, read and written.

Names and defaults are those of https://www.deepspeed.ai/docs/config-json. Whether layers recompute,
and a pipeline, are in the script, not in this file.
"""

import json
from collections.abc import Mapping
from typing import Any

from planner.errors import InputError, PlanError
from planner.exports.configuration import Asked, Batches, Configuration, copies_of
from planner.exports.settings import Settings, parsed
from planner.formats.files import parse_json
from planner.schedule.one_stage import FLUSH
from planner.stages.sharding import UNSHARDED, ZERO_STAGES, Sharding

TENSOR = "tensor_parallel.autotp_size"
OFFLOAD = "zero_optimization.offload_optimizer.device"
_NEUTRAL = (
    *("optimizer.params.*", "scheduler.*", "gradient_clipping", "steps_per_print", "dump_state"),
    *("wall_clock_breakdown", "wandb.*", "csv_monitor.*", "tensorboard.*", "comet.*"),
    *("flops_profiler.*", "comms_logger.*", "checkpoint.*", "data_types.grad_accum_dtype"),
    *("fp16.*loss_scale*", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.fp16_*"),
    *("fp16.consecutive_hysteresis", "prescale_gradients", "gradient_predivide_factor"),
    *("sparse_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("cuda_visible_devices", "seed", "zero_optimization.*16bit_weights*", "local_rank"),
    *("zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint"),
    *("zero_optimization.offload_*.pin_*", "zero_optimization.offload_*.*_path"),
    *("zero_optimization.allgather_partitions", "zero_optimization.ignore_unused_parameters"),
    "zero_optimization.legacy_stage1",
)
_PRICED: Mapping[str, object] = {
    "zero_optimization.overlap_comm": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.contiguous_gradients": True,
    "gradient_accumulation_dtype": "fp32",
}
# Optimizers whose state and whose update are as large as Adam's.
_OPTIMIZERS = ("adam", "adamw", "fusedadam", "torch_adam")


def read_deepspeed(text: str, asked: Asked) -> Configuration:
    """Read a DeepSpeed file for so many GPUs.

    Raises:
        InputError: for what is no JSON, for a value that its key cannot have, and for degrees and
            batches that do not divide.
    """
    said = parsed(asked.file.name, "JSON", parse_json, text)
    return configuration_of(said, asked)


def configuration_of(said: Settings, asked: Asked) -> Configuration:
    """Return what DeepSpeed's settings say."""
    if asked.gpus is None:
        raise InputError(
            f"{said.file} does not say on how many GPUs it runs",
            hint="give `gpus=8`, or `servers` and `gpus_per_server`",
        )

    tensor = said.count(TENSOR) or said.count("tensor_parallel.tp_size") or 1
    copies = copies_of(tensor, 1, asked.gpus)
    batches = Batches(
        said.file,
        said.count("train_micro_batch_size_per_gpu"),
        said.count("gradient_accumulation_steps"),
        said.count("train_batch_size"),
    )
    micro, whole = batches.settled(asked, copies)
    sharding = zero_stage(said, "zero_optimization.stage") or UNSHARDED
    if sharding.divides_weights:
        sharding = sharding.in_groups(_group(said, copies))
    _understand_optimizer(said)
    offload = said.values.get(OFFLOAD) == "cpu"
    if offload or said.values.get(OFFLOAD) == "none":
        said.get(OFFLOAD)
    dtype = _dtype(said)
    autocast = _understand_autocast(said)
    return Configuration(
        tensor=tensor,
        gpus=asked.gpus,
        micro_batch=micro,
        global_batch=whole,
        recomputes=bool(asked.recomputes),
        sharding=sharding if copies > 1 else UNSHARDED,
        dtype=dtype,
        autocast=autocast,
        offload=offload,
        stack="eager",
        unknown=said.left(_NEUTRAL, _PRICED),
        remarks=_remarks(said, asked),
    )


def zero_stage(said: Settings, key: str) -> Sharding | None:
    """Return what a stage of ZeRO divides; raise InputError for a number that is none."""
    stage = said.count(key, least=0)
    if stage is None:
        return None
    if stage >= len(ZERO_STAGES):
        raise said.wrong(key, "no stage of ZeRO", "give 0, 1, 2 or 3")
    return ZERO_STAGES[stage]


def _group(said: Settings, copies: int) -> int:
    """Return how many replicas divide what there is: all, or MiCS's groups."""
    group = said.count("zero_optimization.mics_shard_size", least=-1)
    if group is None or group < 1 or group >= copies:
        return 0
    return group


def _understand_optimizer(said: Settings) -> None:
    """Take note of an optimizer that is priced; others are named."""
    name = said.values.get("optimizer.type")
    if isinstance(name, str) and name.lower() in _OPTIMIZERS:
        said.get("optimizer.type")


def _dtype(said: Settings) -> str | None:
    """Return the type of weights and products; None where the file leaves it open."""
    bfloat16 = said.switch("bf16.enabled") or said.switch("bfloat16.enabled")
    float16 = said.switch("fp16.enabled")
    said.get("fp16.auto_cast")
    if bfloat16 and float16:
        raise said.wrong("fp16.enabled", "and bf16.enabled, too", "enable one of them")
    if bfloat16:
        return "bfloat16"
    if float16:
        return "float16"
    left_open = [
        key for key in ("bf16.enabled", "fp16.enabled") if said.values.get(key) is not None
    ]
    if any(said.values[key] == "auto" for key in left_open):
        return None
    return "float32"


def _understand_autocast(said: Settings) -> bool:
    """Return whether products alone are in half precision."""
    return bool(said.switch("torch_autocast.enabled"))


def _remarks(said: Settings, asked: Asked) -> tuple[str, ...]:
    sections = [key for key in said.values if key.startswith("activation_checkpointing.")]
    if not sections or asked.recomputes is not None:
        return ()
    return (
        "whether layers recompute is in the script, not in the file: this is the price without; "
        "`recompute=blocks` prices it",
    )


def write_deepspeed(run: Configuration, _: str = "") -> str:
    """Write the keys of a JSON file that say what the configuration does; others stay as they are.

    Raises:
        PlanError: for what DeepSpeed has no keys for.
    """
    if run.gpus is None:
        raise PlanError("the configuration does not say for how many GPUs it is")
    content: dict[str, Any] = {
        "train_batch_size": run.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation(run.gpus),
    }
    content |= sections_of(run)
    return json.dumps(content, indent=2)


def sections_of(run: Configuration) -> dict[str, Any]:
    """Return DeepSpeed's sections on sharding, precision and divided layers."""
    if run.pipeline > 1 or run.schedule is not FLUSH:
        raise PlanError("DeepSpeed's file has no form for a pipeline")
    if run.recomputes_some:
        raise PlanError("DeepSpeed's script recomputes all layers or none")
    if run.tensor > 1 and run.sharding.divides_weights:
        raise PlanError("DeepSpeed has no tensor parallelism for layers whose weights are sharded")
    zero: dict[str, Any] = {"stage": run.sharding.zero_stage}
    if run.sharding.group and not run.sharding.divides_weights:
        raise PlanError("DeepSpeed's groups of replicas shard weights")
    if run.sharding.group:
        zero["mics_shard_size"] = run.sharding.group
    if run.offload:
        zero["stage"] = max(1, zero["stage"])  # the first stage that DeepSpeed offloads
        zero["offload_optimizer"] = {"device": "cpu"}

    sections: dict[str, Any] = {"zero_optimization": zero}
    if run.dtype in ("bfloat16", "float16"):
        name = "bf16" if run.dtype == "bfloat16" else "fp16"
        sections[name] = {"enabled": True}
    if run.dtype is None:  # as the file leaves it
        sections["bf16"] = {"enabled": "auto"}
    if run.autocast:
        sections["torch_autocast"] = {"enabled": True}
    if run.tensor > 1:
        sections["tensor_parallel"] = {"autotp_size": run.tensor}
    return sections
