"""Which operations a training step runs, and what each computes and moves, from shapes alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from planner.profiler.estimated.devices import COMPUTE_CLASSES, MEMORY_CLASSES, OP_CLASSES, DeviceSpec, DType, OpClass

aten = torch.ops.aten

_HALF: dict[torch.dtype, DType] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_STATES_KEPT = 11.3  # by oneDNN, beside the gates

# By the start of the operation's name; the first that fits.
_CLASSES: tuple[tuple[OpClass, tuple[str, ...]], ...] = (
    ("attention", ("_scaled_dot_product", "_flash_attention", "_efficient_attention")),
    ("conv", ("convolution", "_convolution", "mkldnn_convolution", "conv_")),
    ("gemm", ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_scaled_mm")),
    ("random", ("bernoulli", "native_dropout", "normal", "uniform", "rand", "exponential")),
    ("norm", ("native_batch_norm", "_native_batch_norm", "native_layer_norm", "native_group_norm", "cudnn_batch_norm")),
    ("norm", ("_fused_rms_norm", "batch_norm", "_batch_norm", "miopen_batch_norm", "mean", "sum", "var", "std")),
    ("pool", ("max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive_", "upsample")),
    ("gather", ("embedding", "index", "gather", "scatter", "_embedding_bag", "nll_loss", "select_backward")),
    ("special", ("gelu", "tanh", "sigmoid", "_softmax", "_safe_softmax", "_log_softmax", "silu", "exp", "log", "pow")),
    ("special", ("erf", "sin", "cos", "sqrt", "rsqrt", "softplus", "elu", "mish")),
)
# These read as much as they write, however large what they look things up in is.
_LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "take")
_NO_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense", "device")


@dataclass(frozen=True)
class Operation:
    """One operation, or a sequence of `launches` like ones (the steps of a recurrent layer)."""

    op_class: OpClass
    flops: float
    bytes: float
    dtype: DType
    launches: int = 1


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of a base class without types
    """Collects the operations that run inside it; tensors without data will do.

    Args:
        single: what float32 stands for in products: "tf32" on devices that use it, or "float32".
        op_class: of all operations, whatever they are; None for each its own.
    """

    def __init__(self, single: DType = "float32", op_class: OpClass | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._single = single
        self._op_class = op_class

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and func.namespace != "prim":
            for operation in operations_of(func, args, kwargs, out, self._single):
                self.operations.append(replace(operation, op_class=self._op_class or operation.op_class))
        return out


class _RecurrentWorkspace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the fused recurrent layers the workspace that they keep for their backward, which has no size without data.

    Per step and sample the gates, the cell, and the states that go in and out twice: as measured for oneDNN's LSTM.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not aten.mkldnn_rnn_layer.default:
            return out
        sequence, hidden_weights = args[0], args[2]
        per_sample = hidden_weights.shape[0] + round(_STATES_KEPT * hidden_weights.shape[1])
        shape = (sequence.shape[0], sequence.shape[1], per_sample)
        return (*out[:3], torch.empty(shape, dtype=sequence.dtype))


def recurrent_workspace() -> contextlib.AbstractContextManager[Any]:
    """Inside, fused recurrent layers keep as much for their backward without data as they do with it."""
    return _RecurrentWorkspace()  # type: ignore[no-untyped-call]


def operations_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, single: DType
) -> Iterator[Operation]:
    """What one call does; nothing for views and for making room."""
    name = func._schema.name.partition("::")[2]
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if name.rstrip("_") in _NO_WORK or _is_view(func, read, written):
        return
    dtype = _HALF.get((read or written)[0].dtype, single) if read or written else single
    if name.startswith("mkldnn_rnn_layer"):
        yield from _recurrent(name, args, dtype)
        return
    op_class = _class_of(name, args, dtype)
    moved = 2 * _bytes(written) if name in _LOOKUPS else _bytes(read) + _bytes(written)
    yield Operation(op_class, _flops(func, args, kwargs, out) if op_class in COMPUTE_CLASSES else 0.0, moved, dtype)


def _is_view(func: torch._ops.OpOverload, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    if func._schema.is_mutable or not written:
        return not written
    storages = {_storage(tensor) for tensor in read}
    return all(_storage(tensor) in storages for tensor in written)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """An expanded tensor is read from caches: what lies in memory counts."""
    total = 0
    for tensor in tensors:
        size = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 0)
        total += size * tensor.dtype.itemsize
    return total


def _class_of(name: str, args: tuple[Any, ...], dtype: DType) -> OpClass:
    for op_class, starts in _CLASSES:
        if name.startswith(starts):
            winograd = op_class == "conv" and dtype == "float32" and _suits_winograd(name, args)
            return "winograd" if winograd else op_class
    return "pointwise"


def _suits_winograd(name: str, args: tuple[Any, ...]) -> bool:
    """3x3, stride 1, one group, enough channels: where cuDNN takes Winograd's algorithm, in single precision."""
    first = 1 if name == "convolution_backward" else 0
    _, weight = args[first], args[first + 1]
    stride, dilation = args[first + 3], args[first + 5]
    return (
        tuple(weight.shape[2:]) == (3, 3)
        and all(step == 1 for step in (*stride, *dilation))
        and weight.shape[1] >= 16
        and args[first + 8] == 1
    )


def _flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Multiplications and additions, counted separately."""
    count: Callable[..., Any] | None = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=out))
    name = func._schema.name.partition("::")[2]
    if name.startswith("_scaled_dot_product"):
        if name.endswith("backward"):
            return float(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if name in ("mv", "addmv", "dot"):
        return 2.0 * max(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    return 0.0


def _recurrent(name: str, args: tuple[Any, ...], dtype: DType) -> Iterator[Operation]:
    """One layer in one direction: a product over all steps, and a product per step that must wait for the last one.

    The backward does each twice: for the weights over all steps, for the input of each.
    """
    tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
    sequence, w_input, w_hidden = tensors[:3]
    steps, batch = sequence.shape[:2]
    element = sequence.dtype.itemsize
    input_flops, step_flops = 2.0 * batch * w_input.numel(), 2.0 * batch * w_hidden.numel()
    gates = w_hidden.shape[0]
    hidden_bytes = element * batch * (3 * gates + 4 * w_hidden.shape[1])
    products = 2 if name.endswith("backward") else 1
    over_steps = element * (steps * batch * (w_input.shape[1] + gates) + w_input.numel())
    yield Operation("recurrent", products * steps * input_flops, products * over_steps, dtype)
    if products == 2:
        yield Operation("recurrent", steps * step_flops, over_steps, dtype)  # gradient of the recurrent weights
    # The weights are read again at each step; a product and the gates' arithmetic are two launches.
    yield Operation(
        "recurrent", steps * step_flops, steps * (_bytes([w_hidden]) + hidden_bytes), dtype, launches=2 * steps
    )


class Costs:
    """Operations as numbers, in the order in which they ran.

    Args:
        operations: from a Recorder.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._class = np.array([OP_CLASSES.index(op.op_class) for op in operations], dtype=np.int64)
        self._flops = np.array([op.flops for op in operations], dtype=np.float64)
        self._bytes = np.array([op.bytes for op in operations], dtype=np.float64)
        self._launches = np.array([op.launches for op in operations], dtype=np.float64)
        self._dtypes = [op.dtype for op in operations]

    def seconds(self, spec: DeviceSpec) -> NDArray[np.float64]:
        """Roofline time of each operation (Williams et al. 2009): the slower of arithmetic and memory, and the launch.

        t = max(flops / (peak · achieved), bytes / (bandwidth · achieved)) + launches · launch_s
        """
        peaks = {dtype: spec.peak(dtype) for dtype in set(self._dtypes)}
        peak = np.array([peaks[dtype] for dtype in self._dtypes], dtype=np.float64)
        # Only classes that compute count arithmetic at all.
        shares = [spec.achieved_arithmetic[name] for name in COMPUTE_CLASSES] + [1.0] * len(MEMORY_CLASSES)
        arithmetic = np.array(shares)[self._class]
        bandwidth = np.array([spec.achieved_bandwidth[name] for name in OP_CLASSES])[self._class]
        compute_s = self._flops / (peak * arithmetic)
        memory_s = self._bytes / (spec.bandwidth_bytes_per_s * bandwidth)
        return np.asarray(np.maximum(compute_s, memory_s) + self._launches * spec.launch_s)

    def classes(self) -> set[OpClass]:
        """Those that occur."""
        return {OP_CLASSES[index] for index in set(self._class.tolist())}
