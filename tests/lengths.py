"""Profiles of layers whose costs depend on lengths, with round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.formats.profile import Fit, Layer, LayerFits, Lengths, Profile, Shares
from tests.samples import profile

LINEAR = (0.25, 0.75, 0.0)
QUADRATIC = (0.0, 0.5, 0.5)


def varying_profile(
    layers: Sequence[Layer],
    shares: Sequence[Shares],
    samples: Sequence[int],
    order: Literal["random", "buckets", "given"] = "given",
    microbatch_size: int = 1,
) -> Profile:
    """A chain whose times and messages have these shares, by layer, of one length of up to 100."""
    fits = [Fit(shares=each, residual=0.0) for each in shares]
    own = tuple(
        LayerFits(
            forward_s=fit,
            backward_s=fit,
            saved_bytes=fit,
            flops=fit,
            outputs=(fit,) * len(layer.outputs),
        )
        for layer, fit in zip(layers, fits, strict=True)
    )
    lengths = Lengths(
        names=("words",),
        least=(1,),
        most=(100,),
        profiled=((100,), (1,), (34,), (67,)),
        layers=own,
        samples=(tuple(samples),),
        order=order,
    )
    return profile(*layers, microbatch_size=microbatch_size).model_copy(update={"lengths": lengths})


def cost_at(shares: Shares, length: int) -> float:
    """The cost at a length as a part of that at the greatest."""
    x = length / 100
    return shares[0] + shares[1] * x + shares[2] * x * x
