"""The checkpoints of a PipelineTrainer that saves twice at a step, or removes what it came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers are not ours

TIMEOUT_S = 200
SCRIPT = """
import sys

import torch
import transformers

import planner

class AtEpoch(transformers.TrainerCallback):
    def on_epoch_end(self, args, state, control, **_):
        control.should_save = True
        return control

def trainer(steps, limit, **more):
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )
    drawn = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": each.tolist(), "labels": each.tolist()} for each in drawn]
    arguments = transformers.TrainingArguments(
        "out", use_cpu=True, report_to="none", per_device_train_batch_size=4, disable_tqdm=True,
        max_steps=steps, save_strategy="steps", save_steps=2, save_total_limit=limit,
    )
    return planner.PipelineTrainer(
        model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=rows,
        callbacks=[AtEpoch()], **more,
    )

steps, limit, resume = int(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
if not resume:
    profile = trainer(steps, limit).profile(device="cpu", seconds=0.1)
    cluster = planner.flat_cluster(1, "1Gbps")
    planner.price(profile, cluster, 1, schedule="1f1b-flush", microbatches=1).save()
trainer(steps, limit, plan="plan.json").train(resume_from_checkpoint=resume or None)
"""


def run(folder: Path, *arguments: str) -> set[str]:
    """Train in one process, and return the checkpoints that are left."""
    worker = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29747", "GLOO_SOCKET_IFNAME": "lo"}
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=folder,
        env=os.environ | worker | meeting | paths,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {path.name for path in folder.glob("out/checkpoint-*") if path.is_dir()}


def test_two_saves_at_a_step_and_a_checkpoint_that_goes(tmp_path: Path) -> None:
    """An epoch has four steps, at whose end a callback saves what was saved just before."""
    assert run(tmp_path, "4", "9") == {"checkpoint-2", "checkpoint-4"}
    assert list((tmp_path / "out" / "checkpoint-4" / "pipeline").glob("step-*"))
    # The resumed checkpoint is the first one that goes.
    assert run(tmp_path, "8", "1", "resumed") == {"checkpoint-8"}
    assert list((tmp_path / "out" / "checkpoint-8" / "pipeline").glob("step-*"))
