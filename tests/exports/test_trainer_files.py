"""Files of torchtitan, DeepSpeed and accelerate: what is understood, named and refused, and that
what is written says the same when it is read.

The files here have the settings that these projects publish, at the places that are named, with
other keys beside them; they are not copies.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError, PlanError
from planner.exports.configuration import Asked, Configuration
from planner.exports.trainers import TRAINERS, Trainer
from planner.formats.files import replace
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.one_stage import FLUSH
from planner.schedule.schedule import Schedule
from planner.schedule.zb_v import ZB_V
from planner.stages.sharding import UNSHARDED, Sharding

BY_OPTION = {trainer.option: trainer for trainer in TRAINERS}
NAMES = {"torchtitan": "run.toml", "deepspeed": "ds_config.json", "accelerate": "config.yaml"}

# train_configs/llama3_8b.toml, llama3_70b.toml and llama3_405b.toml of pytorch/torchtitan (BSD-3)
LLAMA_8B = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[compile]
enable = false
components = ["model", "loss"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
filter_fqns = ["output"]
"""
LLAMA_70B = """
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""
LLAMA_405B = """
[model]
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[compile]
enable = true
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""
# training/llama/.../llama4_17bx128e.toml of the same: a pipeline of four stages
PIPELINE = """
[training]
local_batch_size = 8
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
"""
# examples/deepspeed_config_templates/zero_stage3_offload_config.json of huggingface/accelerate
# (Apache-2.0)
ZERO_3 = {
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": 1,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
# training/tensor_parallel/hf_integration/configs/ds_config.json of DeepSpeedExamples (Apache-2.0)
DIVIDED = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
    "tensor_parallel": {"autotp_size": 4},
    "gradient_accumulation_steps": "auto",
}
# training/BingBertSquad/1-bit_adam of the same
ONE_BIT = {
    "train_batch_size": 96,
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "OnebitAdam"},
    "fp16": {"enabled": True},
}
# config_yaml_templates/fsdp.yaml and torch_native_parallelism/configs/tp_hsdp.yaml of the examples
# of huggingface/accelerate (Apache-2.0)
FSDP = """
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
TP_HSDP = """
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
# what `accelerate config` asks for Megatron-LM
MEGATRON = """
distributed_type: MEGATRON_LM
mixed_precision: bf16
num_processes: 16
megatron_lm_config:
  megatron_lm_tp_degree: '2'
  megatron_lm_pp_degree: 4
  megatron_lm_num_micro_batches: 8
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_recompute_activations: true
  megatron_lm_gradient_clipping: 1.0
"""


def read(option: str, content: str | dict[str, Any], **asked: Any) -> Configuration:
    if option == "accelerate":
        pytest.importorskip("yaml")
    text = content if isinstance(content, str) else json.dumps(content)
    return BY_OPTION[option].read(text, Asked(file=Path(NAMES[option]), **asked))


@pytest.mark.parametrize(
    ("option", "content", "asked", "said"),
    [
        (
            "torchtitan",
            LLAMA_8B,
            {"gpus": 64},
            {
                "micro_batch": 1,
                "global_batch": 64,
                "length": 8192,
                "sharding": Sharding(3),
                "dtype": "bfloat16",
                "unknown": ('activation_checkpoint.selective_ac_option: "op"',),
            },
        ),
        (
            "torchtitan",
            LLAMA_70B,
            {"gpus": 64},
            {
                "tensor": 8,
                "micro_batch": 8,
                "global_batch": 64,
                "recomputes": True,
                "sequence_parallel": True,
                "sharding": Sharding(3),
                "unknown": (),
            },
        ),
        (
            "torchtitan",
            LLAMA_405B,
            {"gpus": 128},
            {
                "global_batch": 32,
                "stack": "compiled",
                "precision": "fp8",
                "unknown": (
                    "parallelism.enable_async_tensor_parallel: true",
                    "quantize.linear.float8.enable_fsdp_float8_all_gather: true",
                ),
            },
        ),
        (
            "torchtitan",
            PIPELINE,
            {"gpus": 16},
            {
                "tensor": 2,
                "pipeline": 4,
                "chunks": 2,
                "schedule": INTERLEAVED,
                "micro_batch": 2,
                "global_batch": 16,
                "sharding": Sharding(2),
            },
        ),
        (
            "deepspeed",
            ZERO_3,
            {"gpus": 8, "micro_batch": 4},
            {
                "micro_batch": 4,
                "global_batch": 32,
                "sharding": Sharding(3),
                "dtype": "float16",
                "offload": True,
                "unknown": ("zero_optimization.sub_group_size: 1000000000.0",),
            },
        ),
        (
            "deepspeed",
            DIVIDED,
            {"gpus": 8, "micro_batch": 2, "global_batch": 16},
            {"tensor": 4, "global_batch": 16, "sharding": Sharding(2), "dtype": None},
        ),
        (
            "deepspeed",
            ONE_BIT,
            {"gpus": 8},
            {
                "global_batch": 96,
                "sharding": UNSHARDED,
                "unknown": ('optimizer.type: "OnebitAdam"',),
            },
        ),
        (
            "accelerate",
            FSDP,
            {"micro_batch": 4},
            {"gpus": 2, "global_batch": 8, "sharding": Sharding(3), "unknown": ()},
        ),
        (
            "accelerate",
            TP_HSDP,
            {"micro_batch": 1, "global_batch": 64},
            {"gpus": 8, "machines": 1, "tensor": 2, "sharding": Sharding(3, 2), "unknown": ()},
        ),
        (
            "accelerate",
            MEGATRON,
            {"micro_batch": 1},
            {
                "tensor": 2,
                "pipeline": 4,
                "global_batch": 16,
                "sequence_parallel": True,
                "sharding": Sharding(1),
                "unknown": ("megatron_lm_config.megatron_lm_recompute_activations: true",),
            },
        ),
        (
            "accelerate",
            "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 4\n",
            {"micro_batch": 2},
            {"gpus": 4, "sharding": UNSHARDED, "dtype": "float16", "autocast": True},
        ),
    ],
)
def test_published_settings(
    option: str, content: str | dict[str, Any], asked: dict[str, Any], said: dict[str, Any]
) -> None:
    run = read(option, content, **asked)
    assert {name: getattr(run, name) for name in said} == said


def test_accelerate_reads_the_file_of_deepspeed_that_it_names(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "zero.json").write_text(json.dumps(ZERO_3))
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
        "deepspeed_config:\n  deepspeed_config_file: zero.json\n  zero3_init_flag: false\n"
    )
    asked = Asked(micro_batch=1, file=tmp_path / "config.yaml")
    run = BY_OPTION["accelerate"].read(text, asked)
    assert (run.gpus, run.sharding, run.dtype) == (2, Sharding(3), "float16")


@pytest.mark.parametrize(
    ("option", "content", "asked", "message"),
    [
        ("torchtitan", "[training\n", {"gpus": 8}, "'run.toml' is not TOML: .* line 1"),
        (
            "torchtitan",
            "[parallelism]\ntensor_parallel_degree = 0",
            {"gpus": 8},
            "run.toml: parallelism.tensor_parallel_degree is 0, not a number of 1 or more",
        ),
        ("torchtitan", "", {}, "run.toml leaves the number of GPUs open"),
        (
            "torchtitan",
            "[parallelism]\ndata_parallel_shard_degree = 4",
            {"gpus": 8},
            "run.toml is for 4 GPUs, and the question has 8",
        ),
        (
            "torchtitan",
            "[parallelism]\ntensor_parallel_degree = 3",
            {"gpus": 8},
            "8 GPUs are no copies of 3 stages|8 GPUs are no copies of 1 stages of 3 ranks",
        ),
        (
            "torchtitan",
            '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F2B"',
            {"gpus": 8},
            'pipeline_parallel_schedule is "1F2B", unknown',
        ),
        (
            "torchtitan",
            "[training]\nlocal_batch_size = 3\nglobal_batch_size = 32",
            {"gpus": 8},
            "a global batch of 32 samples is no number of local batches of 3 on 8 copies",
        ),
        ("deepspeed", "{", {"gpus": 8}, "'ds_config.json' is not JSON"),
        ("deepspeed", "[1]", {"gpus": 8}, "'ds_config.json' holds no names with values"),
        ("deepspeed", {}, {}, "ds_config.json does not say on how many GPUs it runs"),
        ("deepspeed", {}, {"gpus": 8}, "ds_config.json leaves the samples of a microbatch"),
        (
            "deepspeed",
            {"train_micro_batch_size_per_gpu": 2},
            {"gpus": 8, "micro_batch": 4},
            "`batch_size=4` has no meaning where ds_config.json says 2",
        ),
        (
            "deepspeed",
            {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 24},
            {"gpus": 8},
            "a global batch of 24 samples is not 8 copies of microbatches of 2",
        ),
        (
            "deepspeed",
            {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 4}},
            {"gpus": 8},
            "zero_optimization.stage is 4, no stage of ZeRO",
        ),
        (
            "deepspeed",
            {
                "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": True},
                "fp16": {"enabled": True},
            },
            {"gpus": 8},
            "fp16.enabled is true, and bf16.enabled, too",
        ),
        ("accelerate", "distributed_type: [", {"gpus": 2}, "'config.yaml' is not YAML"),
        (
            "accelerate",
            "distributed_type: FDSP",
            {"gpus": 2},
            'distributed_type is "FDSP", unknown',
        ),
        (
            "accelerate",
            "distributed_type: FSDP\nnum_processes: 4",
            {"gpus": 2, "micro_batch": 1},
            "config.yaml is for 4 processes, and the question has 2 GPUs",
        ),
        (
            "accelerate",
            "distributed_type: FSDP\nnum_processes: 4",
            {},
            "config.yaml leaves the samples of a microbatch to the script",
        ),
    ],
)
def test_wrong_values_get_one_sentence(
    option: str, content: str | dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(option, content, **asked)


def test_a_missing_reader_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InputError, match="PyYAML") as yaml:
        BY_OPTION["accelerate"].read("", Asked(gpus=2, file=Path("config.yaml")))
    assert yaml.value.hint == "pip install pyyaml"

    monkeypatch.setitem(sys.modules, "tomli", None)
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    with pytest.raises(InputError, match="the package tomli") as toml:
        read("torchtitan", "", gpus=8)
    assert toml.value.hint == "pip install tomli"


LIKE = {
    "megatron": ("",),
    "torchtitan": ("",),
    "deepspeed": ("{}",),
    "accelerate": (
        "distributed_type: MULTI_GPU",
        "distributed_type: FSDP",
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2",
        "distributed_type: DEEPSPEED",
        "distributed_type: MEGATRON_LM",
    ),
}


def drawn(rng: random.Random) -> Configuration:
    """A run of 1 to 64 GPUs, whether or not a trainer has words for it."""
    tensor, pipeline, copies = (rng.choice((1, 1, 2, 4)) for _ in range(3))
    gpus = tensor * pipeline * copies
    micro = rng.choice((1, 2, 3))
    sharding = UNSHARDED
    if copies > 1:
        sharding = Sharding(rng.randrange(4))
        if copies == 4 and sharding.divides_gradients and rng.random() < 0.3:
            sharding = Sharding(sharding.level, 2)
    chunks = None
    if pipeline > 1:
        chunks = rng.choice((1, 1, 2))
    recomputes = rng.random() < 0.5
    schedule: Schedule = FLUSH
    if pipeline > 1 and chunks == 2:
        schedule = rng.choice((INTERLEAVED, ZB_V))
    return Configuration(
        tensor=tensor,
        pipeline=pipeline,
        gpus=gpus,
        machines=rng.choice((None, 1)),
        micro_batch=micro,
        global_batch=micro * copies * rng.choice((1, 2, 6)),
        schedule=schedule,
        chunks=chunks,
        recomputes=recomputes,
        recompute_every=rng.choice((1, 2)) if recomputes else 1,
        sequence_parallel=tensor > 1,
        sharding=sharding,
        dtype=rng.choice(("bfloat16", "float16", "float32")),
    )


@pytest.mark.parametrize("option", [trainer.option for trainer in TRAINERS])
def test_what_is_written_says_the_same_when_it_is_read(option: str) -> None:
    if option == "accelerate":
        pytest.importorskip("yaml")
    trainer = BY_OPTION[option]
    rng = random.Random(1)
    written = 0
    for _ in range(400):
        run = drawn(rng)
        for like in LIKE[option]:
            try:
                again = read_again(trainer, run, like)
            except PlanError:  # for which it has no words
                continue
            written += 1
            assert sizes(again, 8) == sizes(run, 8), (run, like)
            assert again.unknown == ()
    assert written > 40


def read_again(trainer: Trainer, run: Configuration, like: str) -> Configuration:
    asked = Asked(gpus=run.gpus, file=Path("file"))
    if not trainer.says_batches:
        asked = replace(asked, micro_batch=run.micro_batch, global_batch=run.global_batch)
    if not trainer.says_recomputation:
        asked = replace(asked, recomputes=run.recomputes)
    return trainer.read(trainer.write(run, like), asked)


def sizes(run: Configuration, blocks: int) -> Sequence[object]:
    assert run.gpus is not None or run.tensor * run.pipeline
    return (
        run.tensor,
        run.pipeline,
        run.micro_batch,
        run.global_batch,
        run.schedule_of(run.pipeline * (run.chunks or 1)),
        tuple(run.layers_of_stages(blocks)),
        [run.recomputed_of(count) for count in run.layers_of_stages(blocks)],
        run.sharding,
    )


@pytest.mark.parametrize(
    ("blocks", "pipeline", "chunks", "less", "counts"),
    [
        # as `generate_llm_fqn_per_model_part(4, 32, 1, 1)` of torchtitan: 9 9 8 8 with the ends
        (32, 4, 1, (1, 1), [8, 9, 8, 7]),
        (32, 2, 1, (0, 0), [16, 16]),
        (16, 4, 2, (1, 1), [2, 3, 2, 2, 2, 2, 2, 1]),
        (30, 4, 1, (1, 1), [7, 8, 8, 7]),
    ],
)
def test_torchtitan_divides_layers_with_lighter_ends(
    blocks: int, pipeline: int, chunks: int, less: tuple[int, int], counts: list[int]
) -> None:
    run = Configuration(1, 8, pipeline=pipeline, chunks=chunks, lighter_ends=less)
    assert run.layers_of_stages(blocks) == counts
    assert sum(counts) == blocks
