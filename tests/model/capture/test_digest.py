"""Workers capture the model for themselves and compare hashes with the plan's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from planner.model.capture.capture import capture
from planner.model.spec import load_model_file

SPECS = ["profiles/gpt2/model.py:build_tiny", "profiles/lstm_lm/model.py:build_tiny"]

PROGRAM = """
import sys, torch
from tests.model.capture.test_digest import hash_of
torch.manual_seed(5)
for spec in sys.argv[1:]:
    print(hash_of(spec, 5))
"""


def hash_of(spec: str, batch_size: int) -> str:
    """Of a model file's graph, captured with this batch size."""
    file = load_model_file(Path(__file__).parents[3] / spec)
    return capture(file.build_model(), file.example_batch(batch_size), file.loss).hash


def test_hash_is_the_same_in_every_process() -> None:
    torch.manual_seed(2)
    theirs = subprocess.run(
        [sys.executable, "-c", PROGRAM, *SPECS],
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "5", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.split()
    assert theirs == [hash_of(spec, 2) for spec in SPECS]
