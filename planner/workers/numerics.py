"""How exactly numbers are computed, in the whole process: TF32 in products, and deterministic
algorithms.

Both change a profile's times, so training does what the profile was measured with.
"""

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

# Two buffers of fixed size for cuBLAS, which otherwise may choose another algorithm per call: see
# its manual, "Results reproducibility". Read when the first handle is made.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Numerics:
    """What is set, beside PyTorch's own settings."""

    tf32: bool = False  # products of float32 matrices in TF32
    # only algorithms that give the same bits in every run; others raise
    deterministic: bool = False

    def check(self, device_type: str) -> None:
        """Raise InputError for TF32 elsewhere than on CUDA."""
        if self.tf32 and device_type != "cuda":
            hint = "give `dtype=float32`, or `device=cuda`"
            raise InputError(
                f"TF32 is a mode of CUDA's GPUs, and `device={device_type}` has none", hint=hint
            )

    def set(self) -> None:
        """Let this process compute so."""
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        if self.deterministic:
            os.environ.setdefault(*_WORKSPACE)
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic = True
            # it would choose the fastest algorithm, another one in each run
            torch.backends.cudnn.benchmark = False


def numerics_of(record: "Profile | Plan") -> Numerics:
    """Return how a profile was measured, or how a plan's workers compute."""
    return Numerics(record.tf32, bool(record.deterministic))


@contextmanager
def computing(numerics: Numerics) -> Iterator[None]:
    """Compute so, and put back how this process computed."""
    try:
        restore: Callable[[], object] = partial(
            torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
        )
    # a model file has set it by the names of PyTorch 2.9, which the older name does not read
    except RuntimeError:
        matmul: Any = torch.backends.cuda.matmul
        restore = partial(setattr, matmul, "fp32_precision", matmul.fp32_precision)

    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    numerics.set()
    try:
        yield
    finally:
        restore()
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = before
