"""Tests without the mark `gpu` see no GPU, so that they test the same everywhere."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that tests start
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
