"""Describe how the device of an estimate runs a training step: with CUDA's own operations, and with
fused kernels.

PyTorch chooses operations by device. On CUDA dropout and attention are one kernel each, softmax
widens its input itself, and autocast keeps softmax, norms and powers in float32. Tensors that only
pretend to be on CUDA would show that, but a build of PyTorch without CUDA cannot record a backward
for them. So the choices are registered with PyTorch's dispatcher for tensors of the CPU, and taken
back at the end.

Operations are fused as compilers and libraries do: what one kernel passes to itself never reaches
the memory. They keep their place in the list, so that layers keep theirs. A fused one loses the
bytes that it reads from its own kernel, and those that it writes if nobody else reads them; only
the first of a kernel is launched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from planner.formats.files import replace
from planner.formats.names import EightBits, StackName
from planner.model.capture.cuda_autocast import Replacement, aten_operation, replaced_kernels
from planner.model.torch_private import tree_map
from planner.profiler.estimated.devices import OpClass
from planner.profiler.estimated.eight_bits import EightBitProducts
from planner.profiler.estimated.operations import Operation

_CHAINED: frozenset[OpClass] = frozenset({"pointwise", "special", "random", "norm"})


@dataclass
class Flow:
    """Who writes and who reads each value of a step."""

    operations: Sequence[Operation]
    backward: int  # number of the first operation of the backward, which is a program of its own
    writer: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, operation in enumerate(self.operations):
            for value, _ in operation.reads:
                self.readers.setdefault(value, []).append(number)
            for value, _ in operation.writes:
                self.writer[value] = number

    def producers(self, number: int) -> list[int]:
        """Return the operations whose results this one reads."""
        return [
            self.writer[value] for value, _ in self.operations[number].reads if value in self.writer
        ]

    def users(self, number: int) -> list[int]:
        """Return the operations that read a result of this one."""
        return [
            user
            for value, _ in self.operations[number].writes
            for user in self.readers.get(value, ())
        ]


Fusion = Callable[[Flow], Sequence[str | None]]
"""Name the kernel that each operation may be part of. Where one reads what another of this kernel
writes, they join.
"""


def compiler(flow: Flow) -> list[str | None]:
    """Fuse chains of operations without products, as torch.compile does."""
    return ["chain" if operation.op_class in _CHAINED else None for operation in flow.operations]


@dataclass(frozen=True)
class Execution:
    """How a device runs a step."""

    kind: Literal["cpu", "cuda"] = "cpu"  # whose operations run
    fusion: Fusion | None = None  # into one kernel: `compiler`, or the kernels of another program
    # Weights in half precision, and copies in float32; otherwise half precision means autocast.
    master_weights: bool = False
    # then gradients are in half precision, too, as in Apex and older Megatron
    sums_in_half: bool = False
    # Written-out attention is one kernel, fused kernels keep what they read, and logits exist in so
    # many parts (`stacks.py`).
    stack: StackName | None = None
    fuses_attention: bool = False
    keeps_inputs: bool = False
    loss_chunks: int = 1
    expert_ranks: int = 1  # that divide the experts of mixtures, of which this is one
    eight_bits: EightBitProducts | None = None  # of linear layers, beside master weights

    @property
    def is_compiled_alone(self) -> bool:
        """Whether a compiler fuses, and no stack says more than that."""
        return self.fusion is compiler and self.stack is None

    @property
    def products(self) -> EightBits | None:
        """The format of products of linear layers, where it is of 8 bits."""
        if self.eight_bits is None:
            return None
        return self.eight_bits.precision


EAGER_CPU = Execution()


def fused(operations: Sequence[Operation], backward: int, fusion: Fusion | None) -> list[Operation]:
    """Return the operations with their bytes and launches after fusion.

    Args:
        backward: number of the first operation of the backward.
        fusion: what is fused; None for nothing.
    """
    result = list(operations)
    if fusion is None:
        return result
    flow = Flow(operations, backward)
    kernels: dict[int, list[int]] = {}
    for number, first in enumerate(first_of_kernel(flow, fusion(flow))):
        kernels.setdefault(first, []).append(number)
    for members in kernels.values():
        if len(members) > 1:
            _fuse(result, members, flow)

    return result


def first_of_kernel(flow: Flow, kernels: Sequence[str | None]) -> list[int]:
    """Return for each operation the number of the first one of its kernel."""
    first = list(range(len(flow.operations)))
    for number, kernel in enumerate(kernels):
        producers = flow.producers(number)
        for producer in sorted(producers, reverse=True):
            joined = first[producer]
            crosses = (producer < flow.backward) != (number < flow.backward)
            if crosses or kernel is None or kernels[producer] != kernel:
                continue
            # What it needs besides must be there before the kernel starts: it may itself need the
            # kernel's results.
            if all(other < joined or first[other] == joined for other in producers):
                first[number] = joined
                break

    return first


def _fuse(operations: list[Operation], members: Sequence[int], flow: Flow) -> None:
    """Make one kernel of operations: it reads each value once, and writes none that only it
    reads.
    """
    inside = set(members)
    known = {value for number in members for value, _ in operations[number].writes}
    for number in members:
        operation = operations[number]
        moved = sum(size for value, size in operation.reads if value not in known)
        known.update(value for value, _ in operation.reads)
        for value, size in operation.writes:
            readers = flow.readers.get(value)
            if not readers or not inside.issuperset(readers):
                moved += size
        launches = operation.launches if number == members[0] else 0
        operations[number] = replace(
            operation, bytes=min(operation.bytes, float(moved)), launches=launches
        )


aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256  # largest head of the flash kernels
# Operations that autocast runs in float32 on CUDA and not on a CPU
# (torch/aten/src/ATen/autocast_mode.h), as far as models use them. Losses are in float32 on both,
# but for the softmax of the cross-entropy, which CUDA leaves in half.
_SINGLE = (
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "reciprocal",
    "rsqrt",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "rms_norm",
    "logsumexp",
    "cosine_similarity",
)


def cuda_operations() -> AbstractContextManager[None]:
    """Run CUDA's operations within this context; tensors must be fake, because a CPU cannot compute
    them all.
    """
    return replaced_kernels(_substitutes())


def _substitutes() -> Iterator[Replacement]:
    """Yield the operations to replace: their names, the dispatch keys, and what runs instead."""
    yield "dropout", "AutogradCPU", _dropout
    yield "scaled_dot_product_attention", "AutogradCPU", _attention
    if hasattr(aten, "_fused_rms_norm"):  # of torch 2.9
        yield "rms_norm", "AutogradCPU", _rms_norm
    for name, kernel in (
        ("softmax.int", aten._softmax.default),
        ("log_softmax.int", aten._log_softmax.default),
    ):
        yield name, "AutogradCPU", _normalised(kernel, autocast=False)
        yield name, "AutocastCPU", _normalised(kernel, autocast=True)

    yield "cross_entropy_loss", "AutocastCPU", torch.library.fallthrough_kernel
    for name in _SINGLE:
        yield name, "AutocastCPU", _in_single(aten_operation(name))
    for name in ("sum", "sum.dim_IntList"):
        yield name, "AutocastCPU", _sum_in_single(aten_operation(name))


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    result: Tensor = torch.native_dropout(x, p, True)[0] if train and p else x
    return result


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run CUDA's layer norm, whose kernels are those of the RMS norm without means
    (`layer_norm_kernel.cu`).
    """
    result: Tensor = aten.native_layer_norm.default(x, shape, weight, None, eps or 1e-6)[0]
    return result


def _normalised(kernel: Any, *, autocast: bool) -> Callable[..., Tensor]:
    """Return softmax or its logarithm: the kernel reads half precision and writes single, where
    that is asked for.
    """

    def run(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            if autocast and dtype is None and x.dtype in _HALVES:
                dtype = torch.float32
            widens = x.dtype in _HALVES and dtype == torch.float32
            result: Tensor = kernel(x if widens or dtype is None else x.to(dtype), dim, widens)
            return result

    return run


def _in_single(single: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return single(*tree_map(_widened, args), **tree_map(_widened, kwargs))

    return run


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALVES else leaf


def _sum_in_single(total: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None and x.dtype in _HALVES:
            dtype = torch.float32
        with torch.autocast("cpu", enabled=False):
            result: Tensor = total(x, *args, dtype=dtype)
            return result

    return run


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose the kernel as CUDA does: flash in half precision without a mask, otherwise the
    memory-efficient one.
    """
    if q.dtype in _HALVES and attn_mask is None and q.shape[-1] <= _FLASH_HEAD:
        flash: Tensor = aten._scaled_dot_product_flash_attention.default(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash

    if enable_gqa:  # the other kernels want as many keys as queries
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(
                attn_mask.logical_not(), -torch.inf
            )
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])

    efficient: Tensor = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return efficient
