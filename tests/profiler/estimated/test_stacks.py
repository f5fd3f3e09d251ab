"""Stacks of kernels: what they keep is what PyTorch's own partitioner keeps, and attention that a
model writes out is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from benchmarks.gpu_truth.gpt import Gpt
from planner.api.planning import solve
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import ChunkedLoss
from planner.model.spec import TrainingSpec
from planner.profiler.estimated.devices import DEVICES
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.estimated.execution import Execution, Flow
from planner.profiler.estimated.fused_attention import Mask
from planner.profiler.estimated.kept import held_fused, held_unfused
from planner.profiler.estimated.operations import Operation
from planner.profiler.estimated.stacks import COMPILED, EAGER, MEGATRON, Stack, find_stack
from planner.profiler.estimated.step_as_run import mask_of
from planner.profiler.estimated.trace import StepTrace, trace_step

WIDTH, INNER, WORDS, TOKENS, SAMPLES = 64, 192, 512, 32, 4


class Norm(nn.Module):
    """An RMS norm as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batch_of(samples: int) -> tuple[tuple[Tensor], Tensor]:
    tokens = torch.zeros(samples, TOKENS, dtype=torch.long)
    return (tokens,), tokens


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


NET = TrainingSpec(
    "net",
    {"build_model": Net, "example_batch": batch_of, "loss": loss_of, "optimizer": adamw},
)
GPT = Gpt("gpt", 2, 256, 4, 1024, 512, 1024, biases=False, gated=True)


def traced(spec: TrainingSpec, stack: Stack, samples: int = SAMPLES) -> StepTrace:
    execution = stack.running(Execution("cuda", None, master_weights=True))
    return trace_step(spec, samples, "bfloat16", execution=execution)


def saved(step: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes of what a step saves, but for the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step()
    assert loss.requires_grad
    return sum(sizes.values())


@pytest.mark.filterwarnings("ignore")  # of what the compiler imports
def test_fused_kernels_keep_what_pytorchs_partitioner_keeps() -> None:
    """The partitioner of torch.compile, without its code generator, on the same model."""
    model = Net().bfloat16()
    (tokens,), target = batch_of(SAMPLES)
    compiled = torch.compile(
        lambda: loss_of(model(tokens), target), backend="aot_eager_decomp_partition"
    )
    compiled()
    plain = replace(COMPILED, loss_chunks=1)
    assert sum(traced(NET, plain).saved_bytes) == pytest.approx(saved(compiled, model), rel=0.01)

    eager = saved(lambda: loss_of(model(tokens), target), model)
    assert sum(traced(NET, EAGER).saved_bytes) == pytest.approx(eager, rel=0.01)


def test_logits_of_a_chunked_loss_exist_in_parts() -> None:
    logits_bytes = SAMPLES * TOKENS * WORDS * 2
    whole, parts = (
        traced(NET, replace(COMPILED, loss_chunks=chunks)).saved_bytes for chunks in (1, 8)
    )
    assert sum(whole) - sum(parts) == pytest.approx(logits_bytes * 7 / 8, rel=0.02)


def test_written_out_attention_is_one_kernel() -> None:
    """Scores of 1,024 by 1,024 per head are neither kept nor moved."""
    spec = GPT.training_spec()
    scores_bytes = 4 * 1024 * 1024 * 2
    eager, fused = (traced(spec, stack, 1) for stack in (EAGER, MEGATRON))
    layers = GPT.layers
    assert sum(eager.saved_bytes) - sum(fused.saved_bytes) > layers * scores_bytes

    flash = traced(replace(GPT, flash=True).training_spec(), MEGATRON, 1)
    own, other = (
        sum(sum(part) for part in trace.layer_seconds(MEGATRON.on(DEVICES["h100"]))[:2])
        for trace in (fused, flash)
    )
    # The one is masked by a tensor and the other by a flag, which leaves out half.
    assert own == pytest.approx(other, rel=0.25)


def test_what_a_chain_keeps_is_the_smaller_side_of_it() -> None:
    """Of x -> y -> z, where the backward reads y and z, x alone is kept where it is smaller."""
    for x_bytes, kept in ((10, {0}), (300, {1, 2})):
        operations = [
            Operation("gemm", 1.0, 0.0, "float32", name="mm", writes=((0, x_bytes),)),
            Operation("pointwise", 0.0, 0.0, "float32", reads=((0, x_bytes),), writes=((1, 100),)),
            Operation("pointwise", 0.0, 0.0, "float32", reads=((1, 100),), writes=((2, 100),)),
            Operation("pointwise", 0.0, 0.0, "float32", reads=((1, 100), (2, 100))),
        ]
        flow = Flow(operations, backward=3)
        chained = [False, True, True, True]
        assert set(held_unfused(flow).kept) == {1, 2}
        held = held_fused(flow, [0, 1, 1, 3], chained.__getitem__)
        # y makes z, so it is enough, where x is larger
        assert set(held.kept) == (kept if x_bytes < 100 else {1})


def test_masks_are_read_from_a_model() -> None:
    class Config:
        sliding_window = 128
        layer_types = ("sliding_attention", "full_attention")

    model = nn.Module()
    assert mask_of(model) == Mask()
    model.config = Config()  # type: ignore[assignment]
    attention = nn.Module()
    attention.is_causal = True  # type: ignore[assignment]
    model.attention = attention
    mask = mask_of(model)
    assert mask == Mask(causal=True, windows=(128, None))
    # 128 of 4,096 keys and what the diagonal's tiles take, and half of them
    assert mask.share(4096) == pytest.approx(((128 + 200) / 4096 + (2048 + 200) / 4096) / 2)


def test_a_stack_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="'triton' is no stack") as caught:
        find_stack("triton")
    assert "eager, compiled, megatron" in (caught.value.hint or "")


def test_profiles_name_their_stack() -> None:
    options = EstimateOptions("h100", "bfloat16", master_weights=True, stack=COMPILED)
    profile = estimate_profile(NET, SAMPLES, options)
    assert profile.stack == "compiled"
    assert profile.compiled is None

    with pytest.raises(InputError, match="cannot be estimated for a CPU"):
        estimate_profile(NET, SAMPLES, EstimateOptions("cpu", stack=COMPILED))


def test_training_computes_the_loss_in_the_chunks_of_the_stack() -> None:
    options = EstimateOptions("h100", "bfloat16", master_weights=True, stack=COMPILED)
    profile = estimate_profile(NET, SAMPLES, options)
    head = next(layer for layer in profile.layers if layer.name == "head")
    assert profile.chunked_loss == ChunkedLoss(chunks=8, head="head", again_s=head.forward_s)

    plan = solve(profile, flat_cluster(2, 1e9), microbatches=2, schedule="1f1b-flush")
    assert plan.chunked_loss == profile.chunked_loss
    assert "computes the logits of the loss's 8 chunks twice" in plan.notes[-1]
    assert "the loss in one piece" not in plan.notes[-1]


def test_a_loss_that_needs_all_logits_is_trained_whole() -> None:
    def with_z_loss(output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output, target) + 1e-4 * torch.logsumexp(output, -1).square().mean()

    spec = TrainingSpec("net", {**NET.functions, "loss": with_z_loss})
    options = EstimateOptions("h100", "bfloat16", master_weights=True, stack=COMPILED)
    profile = estimate_profile(spec, SAMPLES, options)
    assert profile.chunked_loss is None

    plan = solve(profile, flat_cluster(1, 1e9))
    assert "computes the loss in one piece" in plan.notes[-1]


def test_every_stack_says_how_it_runs_each_group() -> None:
    for stack in (EAGER, COMPILED, MEGATRON):
        operators = [group.operators for group in stack.groups]
        assert {"attention", "cross entropy", "optimizer", "launches"} <= set(operators)
        assert all(group.how and group.source for group in stack.groups)
