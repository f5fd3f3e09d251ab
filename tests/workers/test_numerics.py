"""TF32 and deterministic algorithms."""

from __future__ import annotations

import os

import pytest
import torch

from planner.errors import InputError
from planner.workers.numerics import Numerics, computing


def test_numerics_are_set_within_the_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with computing(Numerics(tf32=True, deterministic=True)):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_nothing_asked_leaves_pytorchs_settings() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with computing(Numerics()):
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_cpu_has_no_tf32() -> None:
    Numerics(tf32=True).check("cuda")
    with pytest.raises(InputError, match=r"TF32 is a mode of GPUs, not of a CPU\nhint: give `dtype=float32`"):
        Numerics(tf32=True).check("cpu")
