"""Starts beside a busy core: none of them fails. Many more: `python -m tests.workers.starts
200`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.starts import MODELS, failures


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_start_fails_beside_a_busy_core(tmp_path: Path) -> None:
    assert failures(len(MODELS), tmp_path) == []
