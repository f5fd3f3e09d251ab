"""Files of weights, as rank 0 writes them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from planner.errors import PlannerError
from planner.executor.communication.collect import save_state


def test_weights_are_readable_for_whom_the_umask_lets(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    before = os.umask(0o027)
    try:
        save_state({"weight": torch.ones(2)}, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["weights.pt"]
    with pytest.raises(PlannerError, match="cannot be written"):
        save_state({"weight": torch.ones(2)}, path / "below")
