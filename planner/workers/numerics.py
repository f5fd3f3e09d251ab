"""How exactly numbers are computed, in the whole process: TF32 in products, and deterministic algorithms.

Both belong to the profile, because both change its times, and training does what the profile was measured with. Without
them PyTorch's own settings stay: since 1.12 products in full float32, and convolutions of cuDNN in TF32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from planner.errors import InputError

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.profile import Profile

# Two buffers of fixed size for cuBLAS, which otherwise may choose another algorithm per call: see its manual,
# "Results reproducibility". Read when the first handle is made.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Numerics:
    """What is set, beside PyTorch's own settings.

    Attributes:
        tf32: products of float32 matrices in TF32.
        deterministic: only algorithms that give the same bits in every run; an operation without one raises.
    """

    tf32: bool = False
    deterministic: bool = False

    def check(self, device_type: str) -> None:
        """Raise InputError for TF32 elsewhere than on CUDA."""
        if self.tf32 and device_type != "cuda":
            other = "a CPU" if device_type == "cpu" else device_type
            hint = "give `dtype=float32`, or `device=cuda`"
            raise InputError(f"TF32 is a mode of CUDA's GPUs, not of {other}", hint=hint)

    def set(self) -> None:
        """Set it for this process, from now on."""
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        if self.deterministic:
            os.environ.setdefault(*_WORKSPACE)
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False  # it would choose the fastest algorithm, another one in each run


def numerics_of(record: Profile | Plan) -> Numerics:
    """Return what `record` was measured with, or is to be trained with."""
    return Numerics(record.tf32, bool(record.deterministic))


@contextmanager
def computing(numerics: Numerics) -> Iterator[None]:
    """Set `numerics` within the context."""
    restore = _precision_now()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    numerics.set()
    try:
        yield
    finally:
        restore()
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = before


def _precision_now() -> Callable[[], object]:
    """Return what sets the precision of matrix products to what it is now."""
    try:
        return partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    except RuntimeError:  # a model file has set it by the names of PyTorch 2.9, which the older name does not read
        matmul: Any = torch.backends.cuda.matmul
        return partial(setattr, matmul, "fp32_precision", matmul.fp32_precision)
