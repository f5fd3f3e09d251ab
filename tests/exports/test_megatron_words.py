"""Megatron's options, read: what is understood, what is not, and what is written here."""

from __future__ import annotations

import pytest

import planner
from planner.errors import InputError
from planner.exports.configuration import Configuration
from planner.exports.megatron import read_arguments
from planner.stages.sharding import Sharding
from tests.executor.plans import in_groups
from tests.exports.plans import plan_of
from tests.exports.test_megatron import blocks

SIZES = "--micro-batch-size 1 --global-batch-size 256"


def test_the_options_of_a_published_run() -> None:
    """GPT-3 175B of Megatron's examples: 8 ranks divide layers, 16 stages."""
    run = read_arguments(
        """
        # a comment
        --num-layers 96 --hidden-size 12288 --seq-length=2048 \\
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \\
        --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --bf16 \\
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --use-distributed-optimizer --overlap-grad-reduce --lr-decay-style cosine
        --micro-batch-size 1 --global-batch-size 1536
        """
    )
    assert run == Configuration(
        tensor=8,
        pipeline=16,
        micro_batch=1,
        global_batch=1536,
        layers=96,
        length=2048,
        layers_per_chunk=2,
        recomputes=True,
        sequence_parallel=True,
        sharding=Sharding(1),
        dtype="bfloat16",
        stack="megatron",
        unknown=("--hidden-size 12288", "--overlap-grad-reduce", "--lr-decay-style cosine"),
    )
    assert run.layers_of_stages(96) == [2] * 48
    assert run.replicas(1024) == 8


def test_what_is_left_out_is_one_and_plain() -> None:
    run = read_arguments(SIZES)
    assert run == Configuration(
        tensor=1, pipeline=1, micro_batch=1, global_batch=256, stack="megatron"
    )
    assert run.layers_of_stages(7) == [7]
    assert run.replicas(8) == 8


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("--pipeline-model-parallel-size 4", [8, 8, 8, 8]),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            [8, 8, 8, 8],
        ),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 10", [10, 11, 11]),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7"
            " --decoder-last-pipeline-num-layers 7",
            [7, 9, 9, 7],
        ),
        (
            '--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout "Et*9|t*12,|t*10tL"',
            [9, 12, 11],
        ),
    ],
)
def test_layers_of_stages(text: str, stages: list[int]) -> None:
    assert read_arguments(f"{text} {SIZES}").layers_of_stages(32) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--micro-batch-size 2", "the string has no --global-batch-size"),
        (f"{SIZES} --tensor-model-parallel-size eight", "is 'eight', not a number of 1 or more"),
        (f"{SIZES} --recompute-method rows", "--recompute-method is 'rows'"),
        (f"8 {SIZES}", "begins with '8', which is no option"),
        (f"{SIZES} --pipeline-model-parallel-layout 'Etm|tL'", "the stage 'Etm' of"),
        (f"{SIZES} --pipeline-model-parallel-layout 'Et", "cannot be read: No closing quotation"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_arguments(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--pipeline-model-parallel-size 5", "32 layers cannot be split equally over 5 stages"),
        ("--num-layers 48", "the model has 32 layers, and the given run says 48"),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
            "32 layers are not stages of 3 on 4 pipeline ranks",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t*4L'",
            "has 5 layers in 2 stages, and the model has 32",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*32|L'",
            "stage 1 has no layer",
        ),
    ],
)
def test_stages_that_are_not_the_models_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_arguments(f"{text} {SIZES}").layers_of_stages(32)


def test_gpus_and_batches_that_do_not_divide_are_refused() -> None:
    run = read_arguments(f"--tensor-model-parallel-size 8 {SIZES}")
    with pytest.raises(InputError, match="12 GPUs are no copies of 1 stages of 8 ranks"):
        run.replicas(12)
    with pytest.raises(InputError, match="256 samples is no number of microbatches of 1 for 3"):
        run.replicas(24)


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        ([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], [2, 2]),
        ([["wte", *blocks(0)], [*blocks(1, 2, 3), "ln_f", "loss"]], [1, 3]),
    ],
)
def test_what_is_written_can_be_read(
    stages: list[list[str]], counts: list[int], degree: int
) -> None:
    plan = plan_of(stages, (2, 2))
    plan = in_groups(plan, degree) if degree > 1 else plan
    run = read_arguments(planner.export(plan, "megatron"))
    assert run.unknown == ()
    assert run.layers_of_stages(4) == counts
    assert run.replicas(4 * degree) == 2
    assert (run.tensor, run.pipeline) == (degree, 2)
    assert (run.micro_batch, run.global_batch) == (plan.microbatch_size, plan.minibatch_size)
