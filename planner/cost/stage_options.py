"""How a stage runs, beside which layers it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.formats.cluster import DeviceKind

# Whether stages keep what their backward needs, or run their forward again: where memory demands it, never, always.
RecomputeRule = Literal["auto", "never", "always"]


@dataclass(frozen=True)
class StageOptions:
    """How a stage runs. `Work.under` and `Footprint.under` say what that does to its time and memory.

    Attributes:
        replicas: workers that run the stage, each on its share of the units.
        recompute: keep only the stage's input for the backward, and run the forward again for the rest.
        kind: of the devices, where the cluster has several; None for the profiled one.
    """

    replicas: int = 1
    recompute: bool = False
    kind: DeviceKind | None = None

    @property
    def speed(self) -> float:
        """Device speed relative to the profiled device."""
        return 1.0 if self.kind is None else self.kind.speed
