"""What tests of the scripts share."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the small model file and the programs that a virtual environment has."""
    shutil.copy(Path(__file__).with_name("small_model.py"), tmp_path / "model.py")
    for name, module in (
        ("plan", "-m planner"),
        ("torchrun", "-m torch.distributed.run"),
        ("python", ""),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    return tmp_path
