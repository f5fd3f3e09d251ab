"""CUDA's operations on tensors of the CPU, products by tiles, fused kernels, the host's pace, and
master weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from benchmarks.gpu_truth.fused_kernels import megatron
from planner.errors import InputError
from planner.model.spec import TrainingSpec, in_memory
from planner.profiler.estimated.devices import DEVICES, HOSTS
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile, profile_of_trace
from planner.profiler.estimated.execution import (
    Execution,
    Flow,
    Fusion,
    compiler,
    cuda_operations,
    fused,
)
from planner.profiler.estimated.operations import Operation, OperationRecorder
from planner.profiler.estimated.roofline import Costs, shares_of_peak
from planner.profiler.estimated.trace import StepTrace, trace_step

HALF = torch.float16


@contextmanager
def recording() -> Iterator[OperationRecorder]:
    with FakeTensorMode(), cuda_operations(), OperationRecorder(gpu=True) as recorder:
        yield recorder


def names(recorder: OperationRecorder) -> list[str]:
    return [operation.name for operation in recorder.operations]


def test_dropout_is_one_kernel_with_a_mask_of_bytes() -> None:
    with recording() as recorder:
        x = torch.empty(1000, requires_grad=True)
        torch.autograd.grad(F.dropout(x, 0.1), x, torch.empty(1000))
    assert names(recorder) == ["native_dropout", "native_dropout_backward"]
    assert recorder.operations[0].bytes == 4000 + 4000 + 1000


def test_the_choices_end_with_the_context() -> None:
    with recording():
        pass
    with FakeTensorMode(), OperationRecorder() as recorder:
        F.dropout(torch.empty(1000, requires_grad=True), 0.1)
    assert "bernoulli" in names(recorder)


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (HALF, False, "_scaled_dot_product_flash_attention"),
        (HALF, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_the_kernel_that_cuda_chooses(
    dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    with recording() as recorder:
        q = torch.empty(2, 4, 128, 64, dtype=dtype, requires_grad=True)
        mask = torch.empty(128, 128, dtype=dtype) if masked else None
        torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, mask), q, torch.empty_like(q))
    assert {kernel, f"{kernel}_backward"} <= set(names(recorder))


def test_causal_attention_leaves_out_half_of_the_products() -> None:
    flops = []
    for causal in (False, True):
        with recording() as recorder:
            q = torch.empty(2, 4, 4000, 128, dtype=HALF, requires_grad=True)
            torch.autograd.grad(
                F.scaled_dot_product_attention(q, q, q, is_causal=causal), q, torch.empty_like(q)
            )
        flops.append([operation.flops for operation in recorder.operations if operation.flops])
    assert len(flops[0]) == 2
    # with the tiles on the diagonal
    assert flops[1] == pytest.approx([1.1 * count / 2 for count in flops[0]])


def test_few_keys_take_as_long_as_512() -> None:
    def flops(keys: int) -> float:
        with recording() as recorder:
            q = torch.empty(2, 4, keys, 128, dtype=HALF)
            F.scaled_dot_product_attention(q, q, q)
        return recorder.operations[0].flops / keys

    assert flops(64) == flops(512) == flops(1024) / 2


@pytest.mark.parametrize("operation", [torch.softmax, torch.log_softmax])
def test_softmax_under_autocast_reads_half_and_writes_single(operation: object) -> None:
    with recording() as recorder, torch.autocast("cpu", HALF):
        value = torch.empty(100, dtype=HALF, requires_grad=True)
        result = operation(value, -1)  # type: ignore[operator]
    assert result.dtype == torch.float32
    assert [each.bytes for each in recorder.operations] == [200 + 400]


def test_softmax_reads_long_rows_three_times_and_writes_a_product_before_its_backward() -> None:
    with recording() as recorder:
        x = torch.empty(10, 2000, requires_grad=True)
        torch.autograd.grad(torch.softmax(x, -1), x, torch.empty(10, 2000))
    assert [each.bytes for each in recorder.operations] == [4 * x.nbytes, 6 * x.nbytes]


def test_cross_entropy_under_autocast_leaves_its_softmax_in_half_precision() -> None:
    with recording() as recorder, torch.autocast("cpu", HALF):
        x = torch.empty(10, 100, dtype=HALF, requires_grad=True)
        loss = F.cross_entropy(x, torch.empty(10, dtype=torch.int64))
        torch.autograd.grad(loss, x)
    moved = {each.name: each.bytes for each in recorder.operations}
    assert names(recorder)[:3] == ["_log_softmax", "_to_copy", "nll_loss_forward"]
    assert (loss.dtype, moved["_log_softmax"]) == (torch.float32, 2 * x.nbytes)
    assert moved["nll_loss_backward"] == 2 * x.nbytes  # zeros in float32


def test_norms_and_powers_under_autocast_are_in_single_precision() -> None:
    with recording() as recorder, torch.autocast("cpu", HALF):
        x = torch.empty(10, 100, dtype=HALF, requires_grad=True)
        results = [F.layer_norm(x, (100,)), x.pow(2), x.rsqrt(), x.sum()]
        assert [result.dtype for result in results] == [torch.float32] * 4
        assert F.linear(x, torch.empty(5, 100)).dtype == HALF
    assert names(recorder)[:2] == ["_to_copy", "native_layer_norm"]


def test_rows_that_begin_anywhere_slow_products_in_half_precision() -> None:
    def seconds(dtype: torch.dtype, *sizes: int, transposed: bool = False) -> float:
        m, n, k = sizes
        with recording() as recorder:
            left = (
                torch.empty(k, m, dtype=dtype).t() if transposed else torch.empty(m, k, dtype=dtype)
            )
            torch.mm(left, torch.empty(n, k, dtype=dtype).t())
        return float(Costs(recorder.operations).seconds(DEVICES["h200"]).sum())

    aligned = seconds(HALF, 4096, 50304, 768)
    assert seconds(HALF, 4096, 50257, 768) == pytest.approx(3355e-6, rel=0.05)  # as measured
    assert seconds(HALF, 4096, 50257, 768) > 5 * aligned
    assert 3 * aligned < seconds(HALF, 4096, 768, 50257) < 5 * aligned  # of an operand alone
    assert seconds(HALF, 4097, 50304, 768) == pytest.approx(aligned, rel=0.05)  # more rows
    assert seconds(HALF, 4097, 50304, 768, transposed=True) > 3 * aligned  # which are columns
    assert seconds(torch.float32, 4096, 50257, 768) == pytest.approx(
        seconds(torch.float32, 4096, 50304, 768), rel=0.05
    )


def test_batches_of_unaligned_matrices_leave_the_tensor_cores() -> None:
    """Scores of heads of 150 on an A100: at 12 TFLOP/s, as runs with such heads imply."""

    def flops_per_s(depth: int) -> float:
        with recording() as recorder:
            mixed = torch.empty(2048, 48, 3 * depth, dtype=HALF, device="cuda")
            queries, keys, _ = (each.transpose(0, 1) for each in mixed.chunk(3, dim=-1))
            torch.bmm(queries, keys.transpose(1, 2))
        seconds = float(Costs(recorder.operations).seconds(DEVICES["a100-80gb"]).sum())
        return 2 * 48 * 2048**2 * depth / seconds

    assert flops_per_s(150) == pytest.approx(12e12, rel=0.1)
    assert flops_per_s(160) > 6 * flops_per_s(150)


def test_products_lose_what_the_last_wave_and_the_last_tiles_leave_empty() -> None:
    def share(*size: int) -> float:
        return float(shares_of_peak(np.array([size]), 108)[0])

    whole = share(1, 256 * 12, 128 * 9, 4096)  # 108 tiles: one full wave
    assert whole == pytest.approx(4096 / (4096 + 64))
    assert share(1, 256 * 12, 128 * 9 + 1, 4096) < 0.85 * whole
    assert share(1, 8192, 8192, 8192) > 0.9
    assert share(1, 64, 64, 64) < 0.01  # one tile of one processor
    assert share(1, 64, 64, 65536) > 2 * share(1, 64, 64, 64)  # k is divided among processors
    assert share(64, 64, 64, 64) > 30 * share(1, 64, 64, 64)
    assert share(0, 0, 0, 0) == 1.0  # no product


def test_convolutions_are_products_of_their_pixels_and_channels() -> None:
    def sizes(convolution: nn.Module, x: Tensor) -> list[tuple[int, int, int, int] | None]:
        with OperationRecorder(gpu=True) as recorder:
            convolution(x).sum().backward()
        return [
            operation.product
            for operation in recorder.operations
            if operation.name.startswith("conv")
        ]

    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert sizes(nn.Conv2d(3, 16, 3, stride=2, padding=1), image) == [(1, 2 * 4 * 4, 16, 3 * 9)] * 2
    # A transposed one goes from few pixels to many, as the other's gradient does.
    features = torch.randn(2, 16, 4, 4, requires_grad=True)
    assert (
        sizes(nn.ConvTranspose2d(16, 3, 2, stride=2), features) == [(1, 2 * 4 * 4, 16, 3 * 4)] * 2
    )
    assert sizes(nn.Conv2d(16, 16, 3, groups=16), features) == [None, None]


def chain_of(*names_: str, size: int = 100) -> list[Operation]:
    """Return operations, each of which reads what the one before it wrote."""
    return [
        Operation(
            "pointwise",
            0.0,
            2.0 * size,
            "float32",
            name=name,
            reads=((n - 1, size),),
            writes=((n, size),),
        )
        for n, name in enumerate(names_)
    ]


def moved(
    operations: list[Operation], fusion: Fusion | None, backward: int | None = None
) -> tuple[float, int]:
    kernels = fused(operations, len(operations) if backward is None else backward, fusion)
    return sum(each.bytes for each in kernels), sum(each.launches for each in kernels)


def test_a_compiler_fuses_chains() -> None:
    chain = chain_of("mul", "add", "tanh")
    assert moved(chain, None) == (600, 3)
    assert moved(chain, compiler) == (200, 1)  # reads the first input, writes the last result


def test_what_others_read_is_written() -> None:
    chain = [*chain_of("mul", "add"), Operation("gemm", 1.0, 100.0, "float32", reads=((0, 100),))]
    assert moved(chain, compiler) == (300 + 100, 2)


def test_forward_and_backward_are_programs_of_their_own() -> None:
    assert moved(chain_of("mul", "add"), compiler, backward=1) == (400, 2)


def test_a_kernel_does_not_wait_for_itself() -> None:
    """The product needs the first operation, and the last one needs both."""
    first, second = chain_of("mul", "add")
    product = Operation(
        "gemm", 1.0, 200.0, "float32", name="mm", reads=((0, 100),), writes=((7, 100),)
    )
    second = replace(second, reads=((0, 100), (7, 100)), bytes=300.0)
    assert moved([first, product, second], compiler) == (200 + 200 + 300, 3)


def test_other_programs_kernels_are_fused_as_they_are_named() -> None:
    def tail(flow: Flow) -> list[str | None]:
        return ["tail" if each.name in ("add", "tanh") else None for each in flow.operations]

    assert moved(chain_of("mul", "add", "tanh"), tail) == (400, 2)
    assert moved(chain_of("add", "mul", "tanh"), tail) == (600, 3)


def test_megatron_fuses_masks_into_softmax_and_nothing_else() -> None:
    assert moved(chain_of("mul", "masked_fill", "_softmax"), megatron) == (200, 1)
    assert moved(chain_of("native_dropout", "add"), megatron) == (200, 1)
    assert moved(chain_of("mul", "add", "tanh"), megatron) == (600, 3)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "fuses"),
    [
        (4, 4096, 4096, True),
        (4, 8192, 8192, False),
        (4, 16, 16, False),
        (6, 1024, 1024, False),
        (4, 1023, 1024, False),
    ],
)
def test_megatron_has_a_softmax_for_some_sizes(
    heads: int, queries: int, keys: int, fuses: bool
) -> None:
    scores = Operation(
        "gemm",
        1.0,
        1.0,
        "float16",
        name="bmm",
        product=(heads, queries, keys, 64),
        writes=((0, 1),),
    )
    masked = Operation(
        "pointwise", 0.0, 1.0, "float16", name="masked_fill", reads=((0, 1),), writes=((1, 1),)
    )
    softmax = Operation(
        "special", 0.0, 1.0, "float16", name="_softmax", reads=((1, 1),), writes=((2, 1),)
    )
    kernels = megatron(Flow([scores, masked, softmax], 3))
    assert kernels == [None, *(["softmax"] * 2 if fuses else [None] * 2)]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        weights = torch.softmax((h @ h.transpose(1, 2)) * 0.125, dim=-1)
        result: Tensor = self.down(F.dropout(weights, 0.1) @ h)
        return result


def attending() -> TrainingSpec:
    batch = torch.randn(4, 32, 64)
    return in_memory(
        Attending(),
        example_batch=((batch,), batch),
        loss=lambda output, target: (output.float() - target.float()).pow(2).mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.0),
    )


def traced(fusion: Fusion | None = None) -> StepTrace:
    return trace_step(attending(), 4, execution=Execution("cuda", fusion))


def test_fusion_saves_launches_and_time() -> None:
    eager, megatrons, compiled = (traced(fusion) for fusion in (None, megatron, compiler))
    launches = [trace.costs.launches.sum() for trace in (eager, megatrons, compiled)]
    assert launches == sorted(launches, reverse=True)
    assert launches[0] > launches[1] > launches[2]
    times = [
        sum(map(sum, trace.layer_seconds(DEVICES["a100"])[:2]))
        for trace in (eager, megatrons, compiled)
    ]
    assert times == sorted(times, reverse=True)


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="before torch 2.9 it is many kernels"
)
def test_an_rms_norm_is_one_kernel_each_way() -> None:
    with recording() as recorder:
        x = torch.empty(4, 64, dtype=HALF, requires_grad=True)
        total = F.rms_norm(x, (64,), torch.empty(64, dtype=HALF), 1e-5).sum()
        total.backward()  # type: ignore[no-untyped-call]
    names = [operation.name for operation in recorder.operations]
    assert names.count("native_layer_norm") == names.count("native_layer_norm_backward") == 1
    assert not {"pow", "rsqrt"}.intersection(names)


def test_a_step_takes_no_less_than_its_launches() -> None:
    trace = traced()
    spec = replace(DEVICES["h100"], dispatch_s=1e-3)
    forward, backward, _ = trace.layer_seconds(spec)
    assert sum(forward) + sum(backward) == pytest.approx(1e-3 * trace.costs.launches.sum())
    none = trace.layer_seconds(replace(spec, dispatch_s=0.0))
    assert trace.layer_seconds(replace(spec, dispatch_s=1e-12)) == none


def test_lists_of_weights_wait_for_the_host() -> None:
    trace = traced()
    weights = sum(1 for _ in Attending().parameters())
    # AdamW's operations by foreach
    assert sum(update.host_launches for update in trace.updates) == 8 * weights / 16
    *_, updates = trace.layer_seconds(replace(DEVICES["h200"], dispatch_s=1e-3))
    assert sum(updates) == pytest.approx(8 * weights / 16 * 1e-3)


def test_a_recurrent_layer_is_launched_by_one_call() -> None:
    steps = [
        Operation("recurrent", 0.0, 0.0, "float32", launches=100),
        Operation("gemm", 0.0, 0.0, "float32"),
    ]
    spec = DEVICES["h200"]
    assert Costs(steps).host_seconds(spec) == pytest.approx([100 * HOSTS["fused"], HOSTS["eager"]])
    assert not Costs(steps).host_seconds(replace(spec, dispatch_s=0.0)).any()


def test_captured_kernels_do_not_wait_for_the_host() -> None:
    def step_s(host: str) -> float:
        profile = estimate_profile(attending(), 4, EstimateOptions("h100", host=host))
        return sum(layer.forward_s + layer.backward_s for layer in profile.layers)

    forward, backward, _ = traced().layer_seconds(replace(DEVICES["h100"], dispatch_s=0.0))
    assert step_s("graphs") == pytest.approx(sum(forward) + sum(backward))
    assert step_s("graphs") < step_s("compiled") < step_s("eager")
    assert step_s("100us") == pytest.approx(4 * step_s("25us"), rel=0.2)
    with pytest.raises(InputError, match="`host` cannot be estimated for a CPU"):
        estimate_profile(attending(), 2, EstimateOptions("cpu", host="graphs"))


def test_master_weights_are_eighteen_bytes_per_parameter() -> None:
    half = estimate_profile(attending(), 2, EstimateOptions("a100", "float16", master_weights=True))
    parameters = sum(parameter.numel() for parameter in Attending().parameters())
    held = sum(
        layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in half.layers
    )
    counters = 4 * 4  # Adam's steps, one per tensor
    assert held == (2 + 4 + 4 + 8) * parameters + counters
    assert sum(layer.gradient_bytes for layer in half.layers) == 4 * parameters
    in_half = trace_step(
        attending(),
        2,
        "float16",
        execution=Execution("cuda", master_weights=True, sums_in_half=True),
    )
    assert (
        sum(layer.gradient_bytes for layer in profile_of_trace(in_half, DEVICES["a100"]).layers)
        == 2 * parameters
    )
    assert (half.autocast, half.master_weights, half.dtype) == (None, "float16", "float16")


def test_master_weights_need_half_precision() -> None:
    with pytest.raises(InputError, match="half precision"):
        estimate_profile(attending(), 2, EstimateOptions("a100", master_weights=True))
