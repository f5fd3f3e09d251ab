"""The example of fine-tuning: a model of transformers with LoRA in two stages trains as it does in
one process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from planner.formats.plan import save_plan
from planner.model.spec import load_model_file
from tests.executor.plans import make_plan, structural_profile
from tests.executor.small_base import make_base

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "fine_tune.py"
TIMEOUT_S = 240
EPOCHS, MICROBATCH, MICROBATCHES = 2, 4, 4

transformers: Any = pytest.importorskip(
    "transformers", reason="needs transformers: pip install transformers"
)
peft: Any = pytest.importorskip("peft", reason="needs peft: pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are not ours


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example with a small base, a tokenizer and a text."""
    make_base(tmp_path)
    shutil.copy(EXAMPLE, tmp_path)
    return tmp_path


def one_process(path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses at the ends of the epochs, and the weights, of plain training with the libraries' own
    loaders.
    """
    functions = load_model_file(path).functions
    own = functions["build_model"].__globals__
    torch.manual_seed(0)
    model = own["build_model"]()
    torch.manual_seed(0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "base")
    values = dict(peft.get_peft_model(loaded, own["LORA"]).state_dict())
    model.load_state_dict(
        {name: values[name] for name in values if ".lora_" not in name}, strict=False
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = own["optimizer"](trained)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(
        own["samples"](), MICROBATCH * MICROBATCHES, True, generator=order, collate_fn=torch.stack
    )
    total = EPOCHS * len(loader)
    scheduler = transformers.get_scheduler("cosine", optimizer, total // 10, total)
    losses = []
    for _ in range(EPOCHS):
        for tokens in loader:
            optimizer.zero_grad()
            loss = model(**own["in_batch"](tokens)[1]).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_stages_train_the_adapters_of_one_process(folder: Path, launcher: list[str]) -> None:
    pytest.importorskip(launcher[0].partition(".")[0])
    path = folder / EXAMPLE.name
    plan = make_plan(structural_profile(path, MICROBATCH), (1, 1), "1f1b-flush", MICROBATCHES)
    save_plan(plan, folder / "plan.json")
    command = [sys.executable, "-m", *launcher, path.name, "plan.json", str(EPOCHS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
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
    losses, weights = one_process(path)
    assert [float(loss) for loss in re.findall(r"loss (\S+)", process.stdout)] == pytest.approx(
        losses, abs=1e-4
    )
    tuned = torch.load(folder / "tuned.pt", weights_only=True)
    assert tuned.keys() == weights.keys()
    for name, tensor in weights.items():
        if ".lora_" not in name:
            assert torch.equal(tuned[name], tensor), name
        torch.testing.assert_close(tuned[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    assert any(tensor.any() for name, tensor in tuned.items() if ".lora_B." in name)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").state_dict()
    assert all(torch.equal(adapted[name], tensor) for name, tensor in tuned.items())
