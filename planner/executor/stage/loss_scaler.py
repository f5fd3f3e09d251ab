"""Dynamic loss scaling: small gradients underflow in float16, so backward starts from a loss times a large factor.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; the constants are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from typing import Any

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000  # updates without an overflow before a larger scale is tried


class LossScaler:
    """The loss scale of one stage: a power of two, so that unscaling is exact.

    Every stage has its own, equal on all its replicas. Gradients from a later stage are rescaled to it when they
    arrive.
    """

    def __init__(self, scale: float = FIRST_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = scale
        self._growth_interval = growth_interval
        self._clean = 0  # updates since the last change

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update, whose gradients were all `finite`, or which was skipped."""
        self._clean = self._clean + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self._clean == self._growth_interval:
            self.scale *= GROWTH
            self._clean = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "clean": self._clean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.scale, self._clean = float(state_dict["scale"]), int(state_dict["clean"])
