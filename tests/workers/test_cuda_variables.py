"""What CUDA and NCCL find in a worker's environment."""

from __future__ import annotations

import os

import pytest

from planner.workers.place import CUDA_VARIABLES, set_cuda_variables


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "")  # so that it is put back afterwards
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    set_cuda_variables()
    found = {name: os.environ[name] for name in CUDA_VARIABLES}
    assert found == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_RUNTIME_CONNECT": "0"}
