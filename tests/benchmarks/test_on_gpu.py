"""Without a GPU the benchmark says so, and the pages have the tables of what was kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kept import ROOT
from benchmarks.on_gpu import kernels, tables
from benchmarks.on_gpu.__main__ import NO_GPU, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")
def test_without_a_gpu_it_says_so_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{NO_GPU}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("page", [tables.README, tables.PAGE], ids=lambda page: page.name)
def test_pages_have_the_tables_of_what_was_kept(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.marks("models")[0] in text
    assert tables.filled(text) == text, "python -m benchmarks.on_gpu --tables"


def test_kernels_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        kernels.Row("copy", "float32", "2 x 3", 1.5, None, 2.25, None, kernels.BYTES),
        kernels.Row("GELU", "bfloat16", "2 x 3", 1.5, 4.125, 2.25, 0.5, kernels.BYTES),
    ]
    kernels.write(rows, tmp_path / kernels.FILE)
    assert kernels.read(tmp_path / kernels.FILE) == rows


@pytest.mark.slow
def test_a_model_is_measured() -> None:
    """On a CPU, in a process of its own, because it becomes a worker."""
    case = 'Case("gpt2", 2, "bfloat16", 12, builder="build_tiny")'
    code = (
        f"from benchmarks.on_gpu.models import Case, measure; print(measure({case}, "
        f'"cpu").measured_per_s)'
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert float(run.stdout.split()[-1]) > 0
