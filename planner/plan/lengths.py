"""Lengths of batches that vary: which microbatches a plan is made for, and what these cost.

A microbatch is as long as its longest sample. A plan is made for some microbatches that are drawn from the data, always
the same ones. Costs are searched with their means over these; candidates are simulated with each microbatch's own.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.formats.profile import DegreeCosts, Fit, KindTimes, Lengths, Profile

Extents = tuple[tuple[int, ...], ...]  # of microbatches, the length for each name
Terms = tuple[tuple[float, ...], ...]  # for each microbatch
DRAWN = 256  # microbatches: their mean costs are within a percent or two of those of all


def terms(extents: Iterable[Sequence[int]], most: Sequence[int]) -> Terms:
    """Return for each of some lengths what a fit's shares count for: 1, the lengths, and their products."""
    relative = [[length / greatest for length, greatest in zip(each, most, strict=True)] for each in extents]
    return tuple((1.0, *row, *(x * y for x, y in combinations_with_replacement(row, 2))) for row in relative)


def drawn(lengths: Lengths, size: int) -> Extents:
    """Draw microbatches of so many samples: in buckets by ascending length, otherwise as they come in training."""
    rows = list(zip(*lengths.samples, strict=True))
    if lengths.order == "given":
        chosen = rows[: max(1, len(rows) // size) * size][: DRAWN * size]
    else:
        rows.sort(key=lambda row: sum(length / most for length, most in zip(row, lengths.most, strict=True)))
        # Each sample equally often: what is drawn has the mean of the data.
        chosen = [rows[number * len(rows) // (DRAWN * size)] for number in range(DRAWN * size)]
        if lengths.order == "random":
            random.Random(0).shuffle(chosen)
    batches = (chosen[start : start + size] for start in range(0, len(chosen), size))
    return tuple(tuple(map(max, zip(*batch, strict=True))) for batch in batches)


def in_minibatches(lengths: Lengths, size: int, microbatches: int) -> Extents:
    """Return the drawn microbatches in an order of training, where consecutive ones are a minibatch."""
    found = drawn(lengths, size)
    if lengths.order != "buckets":
        return found
    whole = [found[start : start + microbatches] for start in range(0, len(found), microbatches)]
    random.Random(0).shuffle(whole)
    whole.sort(key=len, reverse=True)  # what is left is no minibatch, and would move the others
    return tuple(extent for minibatch in whole for extent in minibatch)


def mean_terms(profile: Profile) -> NDArray[np.float64] | None:
    """Return the means of `terms` over the drawn microbatches; None where lengths do not vary."""
    if (lengths := profile.lengths) is None:
        return None
    return np.asarray(np.mean(terms(drawn(lengths, profile.microbatch_size or 1), lengths.most), axis=0))


# Of a layer, what has a mean over lengths, and by which fit; what takes memory is that of the longest.
_OF_LAYERS = {"forward_s": "forward_s", "backward_s": "backward_s", "forward_flops": "flops", "backward_flops": "flops"}
# Other kinds of devices, and ranks that divide layers, take as much less for a shorter batch.
_OF_KINDS = {"forward_s": "forward_s", "backward_s": "backward_s"}
_OF_DEGREES = {**_OF_KINDS, "forward_reduced_bytes": "outputs", "backward_reduced_bytes": "outputs"}


def expected(profile: Profile) -> Profile:
    """Return the profile with the means of times over the drawn microbatches, and fits as shares of these means."""
    means, lengths = mean_terms(profile), profile.lengths
    if means is None or lengths is None:
        return profile
    factors, fits = list[dict[str, float]](), []
    for each in lengths.layers:
        own = {name: getattr(each, name) for name in ("forward_s", "backward_s", "flops")}
        by = {name: float(np.dot(fit.shares, means)) for name, fit in own.items()}
        factors.append(by | {"outputs": float(np.dot(each.outputs[0].shares, means)) if each.outputs else 1.0})
        fits.append(each.model_copy(update={name: divided(fit, means) for name, fit in own.items()}))

    def columns(costs: KindTimes | DegreeCosts) -> Any:
        names = _OF_DEGREES if isinstance(costs, DegreeCosts) else _OF_KINDS
        grown = {
            name: tuple(_times(cost, by[fit]) for cost, by in zip(getattr(costs, name), factors, strict=True))
            for name, fit in names.items()
        }
        return costs.model_copy(update=grown)

    layers = tuple(
        layer.model_copy(update={name: _times(getattr(layer, name), by[fit]) for name, fit in _OF_LAYERS.items()})
        for layer, by in zip(profile.layers, factors, strict=True)
    )
    changed: dict[str, Any] = {"layers": layers, "lengths": lengths.model_copy(update={"layers": tuple(fits)})}
    for name in ("kinds", "tensor"):
        changed |= {name: tuple(map(columns, known))} if (known := getattr(profile, name)) else {}
    return profile.model_copy(update=changed)


def _times(cost: float | None, factor: float) -> float | None:
    if cost is None:
        return None
    return round(cost * factor) if isinstance(cost, int) else cost * factor


def divided(fit: Fit, means: NDArray[np.float64]) -> Fit:
    """Return the fit with shares of the mean cost."""
    mean = float(np.dot(fit.shares, means))
    return fit.model_copy(update={"shares": tuple(share / mean for share in fit.shares)}) if mean else fit
