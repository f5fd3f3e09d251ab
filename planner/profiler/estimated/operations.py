"""Record the operations of a training step, and count what each computes and moves, from shapes
alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from planner.model.torch_private import OpOverload, TorchDispatchMode, tree_leaves
from planner.profiler.estimated.devices import COMPUTE_CLASSES, DType, OpClass, Precision
from planner.profiler.step.allocation import Allocations, address_of
from planner.profiler.step.counters import COLLECTIVES, GROUPED, Counter, Totals, model_flops

aten = torch.ops.aten

_HALF: dict[torch.dtype, DType] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Fused attention reaches its share of the peak with heads of this size, and less by this power of
# theirs with smaller ones. With a causal mask, so many keys more are computed than are needed
# (devices.py says of what measurements).
_HEAD, _NARROW_HEADS, ATTENTION_DIAGONAL_KEYS = 128, 0.17, 400
_LEAST_KEYS = 512  # fewer take a GPU as long: each tile of queries is filled and written once
# Wide copies to tensor cores want rows that begin at multiples of 16 bytes. FLOP/s of a processor
# without them: where the result has other rows, and where only an operand has.
_RESULT_UNALIGNED, _OPERAND_UNALIGNED = 0.71e12, 1.11e12
# Batches of such matrices leave the tensor cores (benchmarks/gpu_truth has the runs that show it).
_BATCHED = ("bmm", "baddbmm")
_LONG_ROW = 1024  # of a softmax: longer ones are read three times (`SoftMax.cu`)
# hidden states that oneDNN saves per step and sample besides the gates, as measured
_STATES_KEPT = 11.3

# Class by the start of the operation's name; the first that fits.
_CLASSES: tuple[tuple[OpClass, tuple[str, ...]], ...] = (
    ("attention", ("_scaled_dot_product", "_flash_attention", "_efficient_attention")),
    ("conv", ("convolution", "_convolution", "mkldnn_convolution", "conv_")),
    (
        "gemm",
        ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_scaled_mm", *GROUPED),
    ),
    ("random", ("bernoulli", "native_dropout", "normal", "uniform", "rand", "exponential")),
    (
        "norm",
        (
            "native_batch_norm",
            "_native_batch_norm",
            "native_layer_norm",
            "native_group_norm",
            "cudnn_batch_norm",
        ),
    ),
    (
        "norm",
        (
            "_fused_rms_norm",
            "batch_norm",
            "_batch_norm",
            "miopen_batch_norm",
            "mean",
            "sum",
            "var",
            "std",
        ),
    ),
    ("pool", ("max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive_", "upsample")),
    (
        "gather",
        (
            "embedding",
            "index",
            "gather",
            "scatter",
            "_embedding_bag",
            "nll_loss",
            "select_backward",
        ),
    ),
    (
        "special",
        (
            "gelu",
            "tanh",
            "sigmoid",
            "_softmax",
            "_safe_softmax",
            "_log_softmax",
            "silu",
            "exp",
            "log",
            "pow",
        ),
    ),
    ("special", ("erf", "sin", "cos", "sqrt", "rsqrt", "softplus", "elu", "mish")),
)
# These read as much as they write, however large the table is that they read from.
_LOOKUPS = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "take")
# How often a GPU reads their inputs again: with one kernel for the gradient of the input and one
# for those of the weights; to copy them and to change the copy; to write gradient times result
# first. The last fills with zeros instead.
_READ_AGAIN = {
    "native_layer_norm_backward": 1.0,
    "native_group_norm_backward": 1.0,
    "masked_fill": 1.0,
}
_READ_AGAIN |= {"_softmax_backward_data": 1.5, "nll_loss_backward": -1.0}
LINEAR = ("mm", "addmm", *GROUPED)  # products of linear layers
_NO_WORK = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
    "device",
)


@dataclass(frozen=True)
class Operation:
    """One operation, or the sum of a sequence that takes several `launches` (the steps of a
    recurrent layer).
    """

    op_class: OpClass
    flops: float
    bytes: float
    dtype: Precision
    launches: int = 1
    name: str = ""  # without namespace and overload
    # or convolution: how many of equal size, m, n and k
    product: tuple[int, int, int, int] | None = None
    limit: float = math.inf  # FLOP/s of a GPU's processor
    # Values by number, with their bytes. An operation that changes a value writes a new one.
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()


class OperationRecorder(Counter):  # type: ignore[no-untyped-call]  # of a base class without types
    """Collects the operations that run within its context, beside counting their model FLOPs.

    Args:
        single: the type of float32 products: "tf32" on devices that use it, or "float32".
        op_class: class for all operations; None for the class of each.
        gpu: whether the operations stand for a GPU's kernels.
        grouped: the type of grouped products of float32 under autocast, which casts those that
            their kernel is made of.
    """

    def __init__(
        self,
        single: DType = "float32",
        op_class: OpClass | None = None,
        *,
        gpu: bool = False,
        grouped: DType | None = None,
    ) -> None:
        super().__init__()
        self._gpu = gpu
        self.operations: list[Operation] = []
        self._single, self._grouped = single, grouped or single
        self._op_class = op_class
        self.allocated = Allocations()
        self.until: list[int] = []  # number of operations before each mark
        self.totals_until: list[Totals] = []  # counts before each mark
        self._values: dict[int, int] = {}  # number of the value that a storage has now
        self._numbers = count()

    def saw(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Count an operation, and list it unless it computes nothing."""
        super().saw(func, args, kwargs, out)
        self.allocated.note((args, kwargs), out)
        name = func._schema.name.partition("::")[2]
        read = _tensors((args, kwargs))
        written = _tensors(out) or _changed(func, args)
        if _is_idle(func, name):
            self._forget_reused(read, written)
            return
        if _is_view(func, read, written):
            return

        dtype = self._dtype(name, (read or written)[:1])
        if name.startswith("mkldnn_rnn_layer"):
            self.operations += _recurrent(name, args, dtype)
            return

        op_class = _class_of(name, args, dtype)
        flops = 0.0
        if op_class in COMPUTE_CLASSES:
            flops = _flops(self._gpu, func, args, kwargs, out)
        limit = math.inf
        if op_class == "gemm" and dtype in _HALF.values():
            limit = _limit(read, written)
            if limit < math.inf and name in _BATCHED:
                dtype, limit = "float32", math.inf

        reads = self._values_read(read)
        operation = Operation(
            op_class=self._op_class or op_class,
            flops=flops,
            bytes=self._bytes_moved(name, args, read, written),
            dtype=dtype,
            name=name.removesuffix("_"),
            product=_product(name, args, written),
            limit=limit,
            reads=reads,
            writes=self._values_written(written),
        )
        self.operations.append(operation)

    def _dtype(self, name: str, first: Sequence[Tensor]) -> DType:
        """Return the type of the first tensor, in which an operation computes."""
        single = self._grouped if name.startswith(GROUPED) else self._single
        return _HALF.get(first[0].dtype, single) if first else single

    def _bytes_moved(
        self, name: str, args: tuple[Any, ...], read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> int:
        moved = _bytes(written) + _bytes(written if name in _LOOKUPS else read)
        if not self._gpu:
            return moved

        again = _READ_AGAIN.get(name.removesuffix("_"), 0.0)
        if name in ("_softmax", "_log_softmax") and args[0].shape[args[1]] > _LONG_ROW:
            again = 2.0
        return moved + round(again * _bytes(read))

    # Values have numbers instead of storages, whose memory is used again.

    def _values_read(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
        storages = map(address_of, tensors)
        numbers = [self._values.get(storage, -1 - storage) for storage in storages]
        return tuple(
            (number, _bytes([each])) for number, each in zip(numbers, tensors, strict=True)
        )

    def _values_written(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
        self._values.update({address_of(tensor): next(self._numbers) for tensor in tensors})
        return tuple((self._values[address_of(each)], _bytes([each])) for each in tensors)

    def _forget_reused(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Forget the values that were where new storages are now, as of what a collective made: it
        is no operation of the list, and who reads its result reads none of those.
        """
        known = set(map(address_of, read))
        for tensor in written:
            if address_of(tensor) not in known:
                self._values.pop(address_of(tensor), None)

    def end_span(self) -> int:
        """End a span of operations and of allocations, and return its number."""
        self.totals_until.append(self.mark())
        self.until.append(len(self.operations))
        return self.allocated.mark()


class RecurrentWorkspace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives fused recurrent layers the workspace that they save for their backward, which is empty
    without data.

    It has the gates, the cell, and twice the states that go in and out, per step and sample, as in
    oneDNN's LSTM.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not aten.mkldnn_rnn_layer.default:
            return out
        sequence, hidden_weights = args[0], args[2]
        per_sample = hidden_weights.shape[0] + round(_STATES_KEPT * hidden_weights.shape[1])
        shape = (sequence.shape[0], sequence.shape[1], per_sample)
        return (*out[:3], torch.empty(shape, dtype=sequence.dtype))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_idle(func: OpOverload, name: str) -> bool:
    """Return whether an operation computes nothing, or is counted elsewhere."""
    return func.namespace in ("prim", COLLECTIVES) or name.rstrip("_") in _NO_WORK


def _changed(func: OpOverload, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the lists of tensors that an optimizer's kernel changes in place of returning
    results.
    """
    if func._schema.returns:
        return []
    changed = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        # Fused optimizers could unscale the gradients in place, but do so only when they are given
        # a scale.
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]
    return _tensors(changed)


def _product(
    name: str, args: tuple[Any, ...], written: Sequence[Tensor]
) -> tuple[int, int, int, int] | None:
    """Return the sizes of a matrix product, or of the one that a convolution is: how many of equal
    size, m, n and k.
    """
    match name:
        case "mm" | "bmm":
            return _product_of(args[0], args[1])
        case "addmm" | "baddbmm":
            return _product_of(args[1], args[2])
        case "convolution":
            image, weight, transposed, groups = args[0], args[1], args[6], args[8]
            return _implicit_product(weight, image if transposed else written[0], groups)
        case "convolution_backward":
            gradient, image, weight, transposed, groups = *args[:3], args[7], args[9]
            return _implicit_product(weight, image if transposed else gradient, groups)
        case _:
            if name.startswith(GROUPED) and args[1].dim() == 3:
                return _grouped_product(args[0], args[1])
            return None


def _product_of(left: Tensor, right: Tensor) -> tuple[int, int, int, int]:
    products = left.shape[0] if left.dim() == 3 else 1
    return products, left.shape[-2], right.shape[-1], left.shape[-1]


def _grouped_product(left: Tensor, right: Tensor) -> tuple[int, int, int, int]:
    """Return the sizes of a product whose rows belong to groups, as many to each."""
    groups, inner, columns = right.shape
    return groups, max(1, left.shape[0] // groups), columns, inner


def _limit(read: Sequence[Tensor], written: Sequence[Tensor]) -> float:
    """Return the FLOP/s of a processor that the beginnings of rows allow."""
    if any(map(_has_unaligned_rows, written)):
        return _RESULT_UNALIGNED
    if any(map(_has_unaligned_rows, read)):
        return _OPERAND_UNALIGNED
    return math.inf


def _has_unaligned_rows(matrix: Tensor) -> bool:
    """Return whether rows begin elsewhere than at multiples of 16 bytes."""
    if matrix.dim() < 2:
        return False
    sizes = zip(matrix.shape, matrix.stride(), strict=True)
    return any(n > 1 < step and step * matrix.itemsize % 16 for n, step in sizes)


def _implicit_product(
    weight: Tensor, pixels: Tensor, groups: int
) -> tuple[int, int, int, int] | None:
    """Return the sizes of a convolution: pixels by channels, summed over what one of them sees.

    cuDNN computes it as a product of these sizes (Chetlur et al. 2014, section 3). The backward's
    two products have the same three sizes in other roles, and as many multiplications. Grouped
    convolutions have kernels of their own.
    """
    if groups > 1:
        return None
    return (
        1,
        pixels.numel() // max(1, pixels.shape[1]),
        weight.shape[0],
        math.prod(weight.shape[1:]),
    )


def _is_view(func: OpOverload, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    if func._schema.is_mutable or not written:
        return not written
    storages = {address_of(tensor) for tensor in read}
    return all(address_of(tensor) in storages for tensor in written)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes in memory: repeated reads of an expanded dimension hit the caches."""
    total = 0
    for tensor in tensors:
        size = math.prod(
            n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 0
        )
        total += size * tensor.dtype.itemsize
    return total


def _class_of(name: str, args: tuple[Any, ...], dtype: DType) -> OpClass:
    for op_class, starts in _CLASSES:
        if name.startswith(starts):
            winograd = op_class == "conv" and dtype == "float32" and _suits_winograd(name, args)
            return "winograd" if winograd else op_class
    return "pointwise"


def _suits_winograd(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether cuDNN takes Winograd's algorithm in float32: 3x3, stride 1, one group, enough
    channels.
    """
    first = 1 if name == "convolution_backward" else 0
    _, weight = args[first], args[first + 1]
    stride, dilation = args[first + 3], args[first + 5]
    return (
        tuple(weight.shape[2:]) == (3, 3)
        and all(step == 1 for step in (*stride, *dilation))
        and weight.shape[1] >= 16
        and args[first + 8] == 1
    )


def _flops(
    gpu: bool, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> float:
    """Return the number of multiplications and additions that the kernel does, counted
    separately.
    """
    flops = float(model_flops(func, args, kwargs, out))
    name = func._schema.name.partition("::")[2]
    if not name.startswith("_scaled_dot_product"):
        return flops

    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
    head = given["query"].shape[-1]
    keys = given["key"].shape[-2]
    causal = 1.0
    if given.get("is_causal", False):
        # The fused kernels leave out the tiles above the diagonal, but for those that it crosses.
        causal = min(1.0, 0.5 * (1 + ATTENTION_DIAGONAL_KEYS / keys))

    short = max(1.0, _LEAST_KEYS / keys) if gpu else 1.0
    narrow = narrow_heads(head)
    # In the backward they compute the scores again, a fifth product beside the four of the
    # gradients.
    again = 1.25 if name.endswith("backward") else 1.0
    return float(flops * causal * short * narrow * again)


def narrow_heads(head: int) -> float:
    """Return how much longer fused attention takes per multiplication with heads of this size."""
    return float((_HEAD / head) ** _NARROW_HEADS)


def _recurrent(name: str, args: tuple[Any, ...], dtype: DType) -> Iterator[Operation]:
    """Yield one layer in one direction: a product over all steps, then per step a product that
    needs the last step's.

    The backward does each twice: once for the weights, over all steps, and once for the inputs.
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
        # gradient of the recurrent weights
        yield Operation("recurrent", steps * step_flops, over_steps, dtype)

    # Each step reads the weights again, and launches a product and the gates' arithmetic.
    yield Operation(
        "recurrent",
        steps * step_flops,
        steps * (_bytes([w_hidden]) + hidden_bytes),
        dtype,
        launches=2 * steps,
    )
