"""Dynamic loss scaling: float16 has no small numbers, so gradients are computed of a loss that is made larger.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; the constants are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from typing import Any

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000  # updates without an overflow, after which a larger scale is tried
SCALE = "loss scale"  # under which a message of gradients says what theirs is; no operation's name has a space


class LossScaler:
    """The factor on the loss of one stage's gradients: a power of two, so that it comes off again exactly.

    Each stage has one, the same on all its replicas. A gradient from a later stage with another scale is brought to
    this one.
    """

    def __init__(self, scale: float = FIRST_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = scale
        self._growth_interval = growth_interval
        self._clean = 0  # updates since the last change

    def update(self, finite: bool) -> None:
        """After the gradients of an update turned out `finite`, or not, in which case it is left out."""
        self._clean = self._clean + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self._clean == self._growth_interval:
            self.scale *= GROWTH
            self._clean = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"scale": self.scale, "clean": self._clean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.scale, self._clean = float(state_dict["scale"]), int(state_dict["clean"])
