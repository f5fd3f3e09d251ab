"""The example for Lightning: its Trainer trains a plan of two stages as a loop in one process
trains the model.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from planner.formats.plan import save_plan
from planner.model.spec import load_model_file
from tests.executor.plans import make_plan, structural_profile

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "lightning_loop.py"
TIMEOUT_S = 240
EPOCHS, MICROBATCH, MICROBATCHES = 2, 8, 4

pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Lightning are not ours


def one_process() -> tuple[float, dict[str, Any]]:
    own = load_model_file(EXAMPLE).functions["build_model"].__globals__
    torch.manual_seed(0)
    model = own["build_model"]()
    optimizer = own["optimizer"](model.parameters())
    order: DistributedSampler[Any] = DistributedSampler(own["samples"](), num_replicas=1, rank=0)
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        for inputs, target in DataLoader(
            own["samples"](), MICROBATCH * MICROBATCHES, sampler=order
        ):
            optimizer.zero_grad()
            loss = own["loss"](model(inputs), target)
            loss.backward()
            optimizer.step()
    return float(loss.detach()), model.state_dict()


def test_a_trainer_trains_two_stages_as_one_process(tmp_path: Path) -> None:
    plan = make_plan(structural_profile(EXAMPLE, MICROBATCH), (1, 1), "1f1b-flush", MICROBATCHES)
    save_plan(plan, tmp_path / "plan.json")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(EXAMPLE),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [*command, "plan.json", str(EPOCHS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    loss, weights = one_process()
    (printed,) = re.findall(r"^loss (\S+)$", process.stdout, re.MULTILINE)
    assert float(printed) == pytest.approx(loss, abs=1e-4)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(trained, dict(weights))
    assert (tmp_path / "checkpoints").is_dir()
