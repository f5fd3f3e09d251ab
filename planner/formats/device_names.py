"""Names of kinds of devices, and of what messages are sent with, as users give them."""

from __future__ import annotations

from typing import Literal

DeviceType = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
