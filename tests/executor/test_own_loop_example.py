"""The example of a loop of one's own: it trains as one process, resumes under another plan, and
stops early.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from planner.formats.plan import save_plan
from tests.executor.plans import make_plan, structural_profile

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_loop.py"
TIMEOUT_S = 240


def run_example(folder: Path, plan: str, epochs: int, workers: int) -> list[str]:
    """Run the example under torchrun; return the lines that it prints."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
    ]
    command += ["own_loop.py", plan, str(epochs)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path.cwd()),
    }
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.splitlines()


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_process(epochs: int) -> tuple[nn.Module, list[str]]:
    """Train the example's model in this process, on whole minibatches; return it and the lines to
    print.
    """
    example, lines = load_example(), []
    torch.manual_seed(0)
    model = example.build_model()
    optimizer = example.optimizer(model.parameters())
    training, validation = example.samples(1, 256), example.samples(2, 64)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**epoch
        order = torch.Generator().manual_seed(epoch)
        for inputs, classes in DataLoader(training, 32, shuffle=True, generator=order):
            optimizer.zero_grad()
            loss = example.loss(model(inputs), classes)
            torch.autograd.backward(loss)
            optimizer.step()
        inputs, classes = validation.tensors
        with torch.no_grad():
            output = model(inputs)
        accuracy = float(example.metrics(output, classes)["accuracy"])
        found = float(example.loss(output, classes))
        lines.append(
            f"epoch {epoch}: loss {float(loss.detach()):.4f}, validation {found:.4f}, "
            f"{accuracy:.0%}"
        )
    return model, lines


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b-flush", "gpipe")]
)
def test_the_example_resumes_under_another_plan(schedule: str, tmp_path: Path) -> None:
    path = tmp_path / "own_loop.py"
    shutil.copy(EXAMPLE, path)
    profile = structural_profile(path, 8)
    save_plan(make_plan(profile, (1, 1), schedule, 4), tmp_path / "first.json")
    save_plan(make_plan(profile, (2,), schedule, 4), tmp_path / "second.json")
    printed = run_example(tmp_path, "first.json", 2, 2) + run_example(tmp_path, "second.json", 4, 2)
    model, lines = one_process(4)
    assert printed == lines
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    assert sorted(
        folder.name for folder in (tmp_path / "checkpoints").iterdir() if folder.is_dir()
    ) == [
        "step-00000024",
        "step-00000032",
    ]
