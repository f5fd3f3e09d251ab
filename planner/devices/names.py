"""Names of kinds of devices and of backends, as users give them; apart from the rest, because this needs no torch."""

from __future__ import annotations

from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
