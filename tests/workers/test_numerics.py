"""TF32 and deterministic algorithms."""

from __future__ import annotations

import os
import subprocess
import sys

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
    with pytest.raises(
        InputError,
        match=r"TF32 is a mode of CUDA's GPUs, and `device=cpu` has none\n"
        r"hint: give `dtype=float32`",
    ):
        Numerics(tf32=True).check("cpu")


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="this PyTorch has no such name",
)
def test_a_precision_that_a_model_file_set_by_its_newer_name_stays() -> None:
    """PyTorch refuses to read by the older name what was set by the newer one; in a process, for it
    stays so.
    """
    code = """
import torch
from planner.workers.numerics import Numerics, computing

torch.backends.cuda.matmul.fp32_precision = "tf32"  # as at the top of a model file
for tf32 in (False, True):
    with computing(Numerics(tf32=tf32)):
        print(torch.backends.cuda.matmul.fp32_precision)
print(torch.backends.cuda.matmul.fp32_precision)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["tf32"] * 3, "")
