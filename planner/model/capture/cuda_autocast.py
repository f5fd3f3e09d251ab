"""CUDA's rules of autocast for tensors on the CPU: what has which dtype on a GPU that is not there.

Autocast chooses dtypes by the device of its tensors, and a build of PyTorch without CUDA records no
backward for tensors that only claim to be on it. So within `cuda_autocast` autocast on the CPU
follows CUDA's rules instead of its own. They are those of `ATen/autocast_mode.h`, in its order
(read in PyTorch 2.13; a test compares them with the header of the installed version, and another
with PyTorch's documentation).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from planner.model.torch_private import tree_leaves, tree_map_only

Rule = Literal["half", "single", "single by default", "widest", "refused"]

# Names of ATen's operations by the dtype that they run in: half precision; float32; float32 unless
# the model asks for another; the widest of their arguments. The gradient of a half would be zero or
# infinite too easily in those that are refused.
OPERATIONS: Mapping[Rule, str] = {
    "half": """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu
        addmm addmv addr matmul einsum
        mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention
    """,
    "single": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
        pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
        layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm
        logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa
    """,
    "single by default": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord
        sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
    """,
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """,
    "refused": "binary_cross_entropy",
}

# In half precision as well: on CUDA these run kernels that are listed above or are cuDNN's own,
# whose states are half, too.
_RECURRENT = """
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input
    rnn_relu.data
"""

Kernel = Callable[..., Any]
Replacement = tuple[str, str, Kernel]  # an operation's name, a dispatch key, and what runs instead


@contextmanager
def replaced_kernels(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Let other functions run in place of ATen's kernels while the context lasts."""
    # Private, because a public `Library` is there until Python collects it.
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        # PyTorch says that a kernel is replaced, which is what we want.
        warnings.simplefilter("ignore")
        for name, key, kernel in replacements:
            library.impl(name, kernel, key)
        yield


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let torch.autocast("cpu") follow CUDA's rules while the context lasts."""
    with replaced_kernels((name, "AutocastCPU", kernel) for name, kernel in _rules()):
        yield


def _rules() -> Iterator[tuple[str, Kernel]]:
    kernels = {
        name: _kernel(rule, aten_operation(name))
        for rule, names in OPERATIONS.items()
        for name in names.split()
    }
    kernels |= {name: _kernel("half", aten_operation(name)) for name in _RECURRENT.split()}
    yield from kernels.items()

    for name in rules_of("CPU") - kernels.keys():
        yield name, torch.library.fallthrough_kernel


def _kernel(rule: Rule, run: Kernel) -> Kernel:
    """Return an operation as it runs under autocast."""
    match rule:
        case "half":
            return _in_dtype(run, lambda _: torch.get_autocast_dtype("cpu"))
        case "single":
            return _in_dtype(run, lambda _: torch.float32)
        case "single by default":
            return _in_single_by_default(run)
        case "widest":
            return _in_dtype(run, _widest)
        case "refused":
            return _refused(run)


def rules_of(kind: str) -> set[str]:
    """Return the names of the operations for which autocast has a rule on a kind of device, as
    PyTorch's dispatcher calls it: "CPU" or "CUDA".
    """
    # Private; nothing public lists them.
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{kind}")
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def aten_operation(name: str) -> Any:
    """Return an operation of ATen by its name, as in "softmax.int"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_dtype(run: Kernel, choose: Callable[[Any], torch.dtype]) -> Kernel:
    """Return an operation that casts its arguments to the dtype that is chosen by them."""

    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs))

        def cast(tensor: Tensor) -> Tensor:
            if not _is_cast(tensor):
                return tensor
            return tensor.to(dtype)

        with torch.autocast("cpu", enabled=False):
            return run(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

    return cast_and_run


def _in_single_by_default(run: Kernel) -> Kernel:
    in_single = _in_dtype(run, lambda _: torch.float32)

    def cast_unless_told(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is None:
            return in_single(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return run(*args, dtype=dtype, **kwargs)

    return cast_unless_told


def _widest(arguments: Any) -> torch.dtype:
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
    if any(tensor.dtype == torch.float32 for tensor in tensors):
        return torch.float32
    return torch.get_autocast_dtype("cpu")


def _is_cast(tensor: Tensor) -> bool:
    """Return whether autocast changes the dtype of a tensor at all."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _refused(run: Kernel) -> Kernel:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{run} is unsafe to autocast; its variant with logits is safe, and takes the scores "
            "before the sigmoid"
        )

    return refuse
