"""Let tensors of the CPU run the operations that CUDA runs, so that a step can be traced without a GPU.

PyTorch chooses operations by device. On CUDA dropout and attention are one kernel each, softmax widens its input
itself, and autocast keeps softmax, norms and powers in float32. Tensors that only pretend to be on CUDA would show
that, but a build of PyTorch without CUDA cannot record a backward for them. So the choices are registered with
PyTorch's dispatcher for tensors of the CPU, and taken back at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256  # largest head of the flash kernels
# Operations that autocast runs in float32 on CUDA and not on a CPU (torch/aten/src/ATen/autocast_mode.h), as far as
# models use them. Losses are in float32 on both.
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


@contextmanager
def cuda_operations() -> Iterator[None]:
    """Run CUDA's operations within this context; tensors must be fake, because a CPU cannot compute them all."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # PyTorch says that a kernel is replaced, which is what we want.
        warnings.simplefilter("ignore")
        for name, key, kernel in _substitutes():
            library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _substitutes() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the operations to replace: their names, the dispatch keys, and what runs instead."""
    yield "dropout", "AutogradCPU", _dropout
    yield "scaled_dot_product_attention", "AutogradCPU", _attention
    if hasattr(aten, "_fused_rms_norm"):  # of torch 2.9
        yield "rms_norm", "AutogradCPU", _rms_norm
    for name, kernel in (("softmax.int", aten._softmax.default), ("log_softmax.int", aten._log_softmax.default)):
        yield name, "AutogradCPU", _normalised(kernel, autocast=False)
        yield name, "AutocastCPU", _normalised(kernel, autocast=True)
    for name in _SINGLE:
        yield name, "AutocastCPU", _in_single(_overload(name))
    for name in ("sum", "sum.dim_IntList"):
        yield name, "AutocastCPU", _sum_in_single(_overload(name))


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    result: Tensor = torch.native_dropout(x, p, True)[0] if train and p else x
    return result


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    result: Tensor = aten._fused_rms_norm.default(x, shape, weight, eps)[0]
    return result


def _normalised(kernel: Any, *, autocast: bool) -> Callable[..., Tensor]:
    """Return softmax or its logarithm: the kernel reads half precision and writes single, where that is asked for."""

    def run(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if autocast and dtype is None and x.dtype in _HALVES:
                dtype = torch.float32
            widens = x.dtype in _HALVES and dtype == torch.float32
            result: Tensor = kernel(x if widens or dtype is None else x.to(dtype), dim, widens)
            return result

    return run


def _in_single(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operation(*tree_map(_widened, args), **tree_map(_widened, kwargs))

    return run


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALVES else leaf


def _sum_in_single(operation: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            result: Tensor = operation(x, *args, dtype=torch.float32 if x.dtype in _HALVES and dtype is None else dtype)
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
    """Choose the kernel as CUDA does: flash in half precision without a mask, otherwise the memory-efficient one."""
    if q.dtype in _HALVES and attn_mask is None and q.shape[-1] <= _FLASH_HEAD:
        flash: Tensor = aten._scaled_dot_product_flash_attention.default(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash
    if enable_gqa:  # the other kernels want as many keys as queries
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    efficient: Tensor = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return efficient
