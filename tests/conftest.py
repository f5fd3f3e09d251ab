"""Tests without the mark `gpu` see no GPU, so that they test the same everywhere."""

from __future__ import annotations

import os

import pytest

# pytest-xdist gives its workers a terminal of 80 columns, in which tables are shorter than in a file.
os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True)
def _no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that tests start
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
