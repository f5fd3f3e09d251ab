"""A better run in the words of a trainer's file: faster by the price of what is written, or what
fits where the given run does not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.api.trainer_run import GivenRun, TrainerQuestion, answer_trainer, stages_of
from planner.errors import InputError
from planner.exports.configuration import Asked
from planner.exports.trainers import TRAINERS
from planner.formats.fit import TrainerRun
from planner.options.verbs import FitOptions
from planner.reporting.tables.trainer_run import trainer_run_report
from planner.solver.clock import Clock
from planner.stages.sharding import UNSHARDED
from tests.exports.test_better_megatron import MB, SERVERS, model

BY_OPTION = {trainer.option: trainer for trainer in TRAINERS}
SLOW = {
    "torchtitan": "[training]\nlocal_batch_size = 1\nglobal_batch_size = 64\n"
    "[parallelism]\ntensor_parallel_degree = 4\nenable_async_tensor_parallel = true\n",
    "deepspeed": json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": 64,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        }
    ),
    "accelerate": "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
    "fsdp_config:\n  fsdp_activation_checkpointing: true\n  fsdp_offload_params: true\n",
}


def asked(option: str, text: str, memory_bytes: int | None = None) -> TrainerRun:
    if option == "accelerate":
        pytest.importorskip("yaml")
    about = Asked(gpus=8, file=Path("file"))
    if option == "accelerate":
        about = Asked(gpus=8, micro_batch=1, global_batch=64, file=Path("file"))
    given = GivenRun(BY_OPTION[option], text, BY_OPTION[option].read(text, about), about)
    question = TrainerQuestion(given, SERVERS(memory_bytes), model, Clock())
    return answer_trainer(question, None)


@pytest.mark.parametrize("option", SLOW)
@pytest.mark.parametrize("memory_bytes", [None, 1000 * MB])
def test_a_better_file_is_better_when_it_is_read_again(
    option: str, memory_bytes: int | None
) -> None:
    answer = asked(option, SLOW[option], memory_bytes)
    assert answer.better is not None
    assert answer.arguments is not None
    size = answer.better.microbatch_size or 1
    about = Asked(gpus=8, file=Path("file"))
    if option == "accelerate":
        about = Asked(gpus=8, micro_batch=size, global_batch=64, file=Path("file"))
    elif option == "deepspeed":
        recomputes = "gradient checkpointing on" in answer.in_script
        about = Asked(gpus=8, recomputes=recomputes, file=Path("file"))
    written = BY_OPTION[option].read(answer.arguments, about)
    assert (written.unknown, written.global_batch) == ((), 64)
    stages = stages_of(written, model(size), 8)
    assert tuple(stage.replicas for stage in stages.stages) == answer.better.replicas
    assert tuple(stage.sharding for stage in stages.stages) == tuple(
        stage.sharding for stage in answer.better.stages
    )
    assert answer.speedup is not None
    assert answer.speedup > 1


def test_what_the_price_leaves_out_is_named_beside_the_file() -> None:
    report = trainer_run_report(asked("torchtitan", SLOW["torchtitan"]))
    left_out = "parallelism.enable_async_tensor_parallel: true"
    assert f"{left_out}: not understood, so this is the price of a run without" in report
    assert "as given    DP=2 TP=4, ZeRO-3" in report
    assert "these keys for torchtitan, others as they are:\n\n[training]\n" in report


def test_what_the_script_says_is_named() -> None:
    report = trainer_run_report(asked("accelerate", SLOW["accelerate"]))
    assert "in the script" in report
    assert "samples per forward" in report
    assert "fsdp_config.fsdp_offload_params: true" in report


OFFLOADED = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 64,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def test_an_offloaded_optimizer_is_read_priced_and_written() -> None:
    about = Asked(gpus=8, file=Path("file"))
    deepspeed = BY_OPTION["deepspeed"]
    run = deepspeed.read(json.dumps(OFFLOADED), about)
    assert (run.offload, run.unknown) == (True, ())
    written = json.loads(deepspeed.write(run, ""))["zero_optimization"]
    assert written == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    unsharded = replace(run, sharding=UNSHARDED)
    assert json.loads(deepspeed.write(unsharded, ""))["zero_optimization"]["stage"] == 1
    with pytest.raises(InputError, match="`offload` cannot be combined with `deepspeed`"):
        GivenRun(deepspeed, "", run, about).wanted(FitOptions(offload="optimizer"))
    assert GivenRun(deepspeed, "", run, about).wanted(FitOptions()).offload == "optimizer"


def test_accelerate_has_a_key_for_an_offloaded_optimizer() -> None:
    pytest.importorskip("yaml")
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu\n"
        "  gradient_accumulation_steps: 8\n"
    )
    about = Asked(gpus=8, micro_batch=1, file=Path("file"))
    accelerate = BY_OPTION["accelerate"]
    run = accelerate.read(text, about)
    assert (run.offload, run.unknown) == (True, ())
    assert "offload_optimizer_device: cpu" in accelerate.write(run, text)
    assert accelerate.read(accelerate.write(run, text), about).offload
