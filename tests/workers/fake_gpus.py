"""GPUs that are not there, as PyTorch describes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> list[torch.device]:
    """Let PyTorch see GPUs with these UUIDs; return the list of devices that are made current, as
    it grows.
    """
    current: list[torch.device] = []
    gpus = [SimpleNamespace(uuid=uuid, name="NVIDIA L4", total_memory=24 * 10**9) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[device.index])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return current
