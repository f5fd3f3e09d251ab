"""How the device of an estimate runs a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fusion = Literal["compiler", "apex"]
"""compiler: chains of operations without products, as torch.compile. apex: the fused kernels of Megatron and Apex."""


@dataclass(frozen=True)
class Execution:
    """How a device runs a step.

    Attributes:
        kind: whose operations run: "cpu" or "cuda".
        fusion: which operations are fused into one kernel.
        master_weights: weights and gradients are in half precision, and the optimizer updates copies in float32;
            otherwise half precision means autocast.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    fusion: Fusion | None = None
    master_weights: bool = False


EAGER_CPU = Execution()
