"""The example for accelerate: its loop around a plan of two stages trains as one process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from planner.formats.plan import save_plan
from planner.model.spec import load_model_file
from tests.executor.plans import make_plan, structural_profile

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "accelerate_loop.py"
TIMEOUT_S = 240
EPOCHS, MICROBATCH, MICROBATCHES = 2, 8, 4

pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of accelerate are not ours


def one_process() -> tuple[float, dict[str, Any]]:
    own = load_model_file(EXAMPLE).functions["build_model"].__globals__
    torch.manual_seed(0)
    model = own["build_model"]()
    optimizer = own["optimizer"](model.parameters())
    for epoch in range(EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for inputs, target in DataLoader(
            own["samples"](), MICROBATCH * MICROBATCHES, shuffle=True, generator=order
        ):
            optimizer.zero_grad()
            loss = own["loss"](model(inputs), target)
            loss.backward()
            optimizer.step()
    return float(loss.detach()), model.state_dict()


def test_accelerate_launches_two_stages_that_train_as_one_process(tmp_path: Path) -> None:
    plan = make_plan(structural_profile(EXAMPLE, MICROBATCH), (1, 1), "1f1b-flush", MICROBATCHES)
    save_plan(plan, tmp_path / "plan.json")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = subprocess.run(
        [*command, "--num_processes", "2", str(EXAMPLE), "plan.json", str(EPOCHS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    loss, weights = one_process()
    *_, printed = re.findall(r"^epoch \d+: loss (\S+)$", process.stdout, re.MULTILINE)
    assert float(printed) == pytest.approx(loss, abs=1e-5)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(trained, dict(weights))
