"""Products in 8 bits: what is cast, multiplied and kept, by arithmetic; and published iterations.

The iterations are NVIDIA's, from NVIDIA-NeMo/Megatron-Bridge 067f987 (Apache-2.0),
docs/performance-summary-archive.md, and NVIDIA/NeMo-Framework-Launcher 26e42fa (Apache-2.0),
examples/README.md. No constant was fitted to them.
"""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.recipes import Recipe, predicted_s
from benchmarks.gpu_truth.rows import device
from planner.errors import InputError, PlanError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.plan.trainable import check_base
from planner.profiler.estimated.devices import (
    DEVICES,
    device_spec,
    parse_precision,
    with_eight_bits,
)
from planner.profiler.estimated.eight_bit_gpus import RATES
from planner.profiler.estimated.eight_bits import EightBitProducts, in_eight_bits
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.estimated.operations import Operation
from planner.profiler.estimated.roofline import Costs
from planner.profiler.estimated.stacks import MEGATRON
from planner.reporting.tables.plan import options_words
from planner.solver import search_plan

ROWS, WIDTH, WORDS = 4096, 1024, 32000
X = (0, 2 * ROWS * WIDTH)  # values with their bytes
Y = (1, 2 * ROWS * WIDTH)
LOGITS = (2, 2 * ROWS * WORDS)
D_LOGITS, D_Y, D_X = (3, LOGITS[1]), (4, Y[1]), (5, X[1])
W, HEAD = (-1, 2 * WIDTH * WIDTH), (-2, 2 * WIDTH * WORDS)


def product(m: int, n: int, k: int, *reads: tuple[int, int], to: tuple[int, int]) -> Operation:
    moved = sum(size for _, size in (*reads, to))
    return Operation(
        "gemm",
        2.0 * m * n * k,
        float(moved),
        "bfloat16",
        name="mm",
        product=(1, m, n, k),
        reads=reads,
        writes=(to,),
    )


# x -> linear -> head, and back
STEP = (
    Operation("pointwise", 0.0, float(X[1]), "bfloat16", writes=(X,)),
    product(ROWS, WIDTH, WIDTH, X, W, to=Y),
    product(ROWS, WORDS, WIDTH, Y, HEAD, to=LOGITS),
    Operation("special", 0.0, float(LOGITS[1]), "bfloat16", reads=(LOGITS,), writes=(D_LOGITS,)),
    product(ROWS, WIDTH, WORDS, D_LOGITS, HEAD, to=D_Y),
    product(WIDTH, WORDS, ROWS, D_LOGITS, Y, to=(6, HEAD[1])),
    product(ROWS, WIDTH, WIDTH, D_Y, W, to=D_X),
    product(WIDTH, WIDTH, ROWS, D_Y, X, to=(7, W[1])),
)
UNTIL = (0, 1, 2, 3, 3, 6, 8)


@pytest.mark.parametrize(
    ("precision", "transposes", "bytes_per_element", "kept"),
    [("fp8", True, 6, 1), ("fp8", False, 5, 1), ("mxfp8", False, 4 + 1 / 16, 1 + 1 / 32)],
)
def test_operands_are_cast_once_and_the_head_stays(
    precision: str, transposes: bool, bytes_per_element: float, kept: float
) -> None:
    how = EightBitProducts(parse_precision(precision), transposes)
    step = in_eight_bits(STEP, UNTIL, 3, how)
    names = [operation.name or operation.op_class for operation in step.operations]
    assert names == ["pointwise", "cast", "mm", "mm", "special", "mm", "mm", "cast", "mm", "mm"]
    casts = [operation for operation in step.operations if operation.name == "cast"]
    assert {operation.bytes for operation in casts} == {ROWS * WIDTH * bytes_per_element}

    narrow = [operation for operation in step.operations if operation.dtype == precision]
    assert [each.product for each in narrow] == [STEP[number].product for number in (1, 6, 7)]
    assert narrow[0].bytes == Y[1] + (X[1] + W[1]) / 2
    # marks stay where they were among the operations
    assert step.until == [0, 1, 3, 4, 4, 7, 10]
    # x is kept for the gradient of the weights alone
    assert step.saved_bytes == {1: ROWS * WIDTH * (kept - 2)}


def test_what_attention_keeps_too_is_there_twice() -> None:
    attention = Operation("attention", 1.0, 0.0, "bfloat16", reads=(X,))
    step = in_eight_bits((*STEP, attention), UNTIL, 3, EightBitProducts("fp8", transposes=True))
    assert step.saved_bytes == {1: ROWS * WIDTH}


def test_sizes_that_are_no_multiples_of_16_stay() -> None:
    odd = product(ROWS, WIDTH + 8, WIDTH, X, W, to=Y)
    step = in_eight_bits(
        (STEP[0], odd, *STEP[2:]), UNTIL, 3, EightBitProducts("fp8", transposes=True)
    )
    assert step.operations[1] == odd


def test_long_products_reach_the_share_of_the_table() -> None:
    size = 16384
    narrow = Operation("gemm", 2.0 * size**3, 0.0, "fp8", product=(1, size, size, size))
    for name, rates in RATES.items():
        (seconds,) = Costs([narrow]).seconds(DEVICES[name])
        reached = narrow.flops / seconds / rates.achieved_flops_per_s
        assert 0.9 < reached < 1, name


@pytest.mark.parametrize(
    ("gpu", "precision", "known"),
    [("a100", "fp8", "h100"), ("h100", "mxfp8", "`precision=fp8`"), ("rtx-4090", "mxfp8", "b200")],
)
def test_gpus_without_such_products_are_refused(gpu: str, precision: str, known: str) -> None:
    spec = device_spec(gpu, "bfloat16")
    with pytest.raises(InputError, match=f"has no products in {precision}") as caught:
        with_eight_bits(spec, parse_precision(precision))
    assert known in (caught.value.hint or "")


def test_words_that_are_no_format_are_refused() -> None:
    with pytest.raises(InputError, match="'bf16' is no format of products in 8 bits"):
        parse_precision("bf16")


def test_half_the_clock_is_half_the_rate() -> None:
    rates, half = DEVICES["h100"].eight_bits, DEVICES["h100"].at_clock(0.5).eight_bits
    assert rates is not None
    assert half is not None
    assert half.achieved_flops_per_s == rates.achieved_flops_per_s / 2


SMALL = Gpt("small", 2, 256, 4, 1024, 512, 128, biases=False, gated=True, flash=True)


def test_plans_say_so_and_are_not_trained() -> None:
    options = EstimateOptions("h100", "bfloat16", master_weights=True, precision="fp8")
    profile = estimate_profile(SMALL.training_spec(), 4, options)
    assert profile.products == "fp8"
    assert profile.device.peak_flops_per_s == RATES["h100"].peak_flops_per_s
    plan = search_plan(profile, flat_cluster(2, "nvlink4"), schedule="1f1b-flush")
    assert plan.products == "fp8"
    assert "products in fp8" in (options_words(plan) or "")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    with pytest.raises(PlanError, match="products in fp8, and the executor computes them in bf"):
        check_base(plan)


def test_masters_are_needed() -> None:
    options = EstimateOptions("h100", "bfloat16", precision="fp8")
    with pytest.raises(InputError, match="estimated with weights in half precision and masters"):
        estimate_profile(SMALL.training_spec(), 4, options)


LLAMA = {"biases": False, "gated": True, "flash": True}
LLAMA_8B = Gpt("llama-3-8b", 32, 4096, 32, 14336, 128256, 8192, key_heads=8, **LLAMA)
LLAMA_7B = Gpt("llama-2-7b", 32, 4096, 32, 11008, 32000, 4096, **LLAMA)


def on_a_server(gpt: Gpt, gpu: str, precision: str, samples: int, seconds: float) -> Recipe:
    """128 samples on eight replicas; Llama 3 on H100 with FSDP and 5 layers that recompute."""
    sharded = gpu == "h100" and gpt is LLAMA_8B
    return Recipe(
        gpt,
        gpu,
        gpus=8,
        precision=parse_precision(precision),
        tensor=1,
        pipeline=1,
        context=1,
        chunks=1,
        replicas=8,
        samples=samples,
        microbatches=16 // samples,
        sharded=sharded,
        again=5 if sharded else 0,
        seconds=seconds,
    )


PUBLISHED = (
    on_a_server(LLAMA_8B, "h100", "fp8", 1, 9.0701),
    on_a_server(LLAMA_8B, "b200", "fp8", 2, 4.28004),
    on_a_server(LLAMA_8B, "b200", "mxfp8", 2, 4.43996),
    on_a_server(LLAMA_8B, "gb200", "fp8", 2, 4.15996),
    on_a_server(LLAMA_7B, "h100", "fp8", 1, 4.05695),
)


def test_published_iterations_are_near() -> None:
    errors = []
    for recipe in PUBLISHED:
        seconds = predicted_s(recipe, MEGATRON.on(device(recipe.gpu)))
        errors.append(abs(seconds / recipe.seconds - 1))
    assert median(errors) < 0.05
    assert max(errors) < 0.1
