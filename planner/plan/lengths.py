"""Lengths of batches that vary: which microbatches a plan is made for, and what these cost.

A microbatch is as long as its longest sample. A plan is made for some microbatches that are drawn
from the data, always the same ones. Searches take the mean of each cost over these; a simulation
takes each microbatch's own.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.formats.plan_parts import PlannedLengths
from planner.formats.profile import Lengths, Profile, VaryingLengths

Terms = tuple[tuple[float, ...], ...]  # for each of some microbatches
DRAWN = 256  # microbatches, whose mean costs are within a percent or two of those of all


def terms(extents: Iterable[Sequence[int]], most: Sequence[int]) -> Terms:
    """Return for each of some lengths what a fit's shares count for: 1, the lengths, and their
    products.
    """
    relative = [
        [length / greatest for length, greatest in zip(each, most, strict=True)] for each in extents
    ]
    return tuple(
        (1.0, *row, *(x * y for x, y in combinations_with_replacement(row, 2))) for row in relative
    )


@lru_cache(maxsize=16)
def _planned(lengths: Lengths, size: int, microbatches: int) -> PlannedLengths:
    rows, drawing = list(zip(*lengths.samples, strict=True)), random.Random(0)
    if lengths.order != "given":
        rows.sort(
            key=lambda row: sum(
                length / most for length, most in zip(row, lengths.most, strict=True)
            )
        )
        # Each sample equally often: what is drawn has the mean of the data.
        rows = [rows[number * len(rows) // (DRAWN * size)] for number in range(DRAWN * size)]
    if lengths.order == "random":
        drawing.shuffle(rows)
    batches = [
        rows[start : start + size] for start in range(0, max(1, len(rows) // size) * size, size)
    ]
    if lengths.order == "buckets":
        minibatches = [
            batches[start : start + microbatches] for start in range(0, DRAWN, microbatches)
        ]
        drawing.shuffle(minibatches)
        # what is left is no minibatch, and would move those after it
        minibatches.sort(key=len, reverse=True)
        batches = [batch for minibatch in minibatches for batch in minibatch]
    found = tuple(tuple(map(max, zip(*batch, strict=True))) for batch in batches[:DRAWN])
    return PlannedLengths(
        **{name: getattr(lengths, name) for name in VaryingLengths.model_fields}, microbatches=found
    )


def planned(profile: Profile, microbatches: int = 1) -> PlannedLengths | None:
    """Draw the microbatches of plans with so many per minibatch; None where lengths do not vary."""
    return (
        None
        if profile.lengths is None
        else _planned(profile.lengths, profile.microbatch_size or 1, microbatches)
    )


def planned_terms(lengths: PlannedLengths | None) -> Terms:
    """Return the terms of a plan's microbatches; none where lengths do not vary."""
    return () if lengths is None else terms(lengths.microbatches, lengths.most)


def mean_terms(profile: Profile) -> NDArray[np.float64]:
    return np.asarray(np.mean(planned_terms(planned(profile)), axis=0))


def mean_tokens(profile: Profile) -> int | None:
    """Return the tokens of a sample, without what pads it; None where the model takes none."""
    tokens, lengths = profile.tokens_per_sample, profile.lengths
    if tokens is None or lengths is None:
        return tokens
    means = {
        most: round(fmean(own)) for most, own in zip(lengths.most, lengths.samples, strict=True)
    }
    return means.get(tokens, tokens)  # sequences of one length are as long as they are


# By which fit costs become means over lengths; what takes memory is that of the longest. Other
# kinds of devices, and ranks that divide layers, take as much less for a shorter batch.
_OF_LAYERS = {
    "forward_s": "forward_s",
    "backward_s": "backward_s",
    "forward_flops": "flops",
    "backward_flops": "flops",
}
_FITS = {**_OF_LAYERS, "forward_reduced_bytes": "outputs", "backward_reduced_bytes": "outputs"}


def expected(profile: Profile) -> Profile:
    """Return the profile with the means of times over the drawn microbatches."""
    if (lengths := profile.lengths) is None:
        return profile
    shares = {
        name: [getattr(each, name).shares for each in lengths.layers]
        for name in set(_OF_LAYERS.values())
    }
    shares["outputs"] = [(each.outputs or (each.forward_s,))[0].shares for each in lengths.layers]
    factors = {
        name: (np.array(rows) @ mean_terms(profile)).tolist() for name, rows in shares.items()
    }

    def grown(columns: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
        return {
            name: tuple(map(_times, column, factors[_FITS[name]]))
            for name, column in columns.items()
        }

    columns = grown(
        {name: [getattr(layer, name) for layer in profile.layers] for name in _OF_LAYERS}
    )
    rows = zip(profile.layers, zip(*columns.values(), strict=True), strict=True)
    changed: dict[str, Any] = {"tokens_per_sample": mean_tokens(profile)}
    changed["layers"] = tuple(
        layer.model_copy(update=dict(zip(columns, row, strict=True))) for layer, row in rows
    )
    for what in ("kinds", "tensor"):
        for each in getattr(profile, what) or ():
            own = grown({name: getattr(each, name) for name in _FITS if hasattr(each, name)})
            changed[what] = (*changed.get(what, ()), each.model_copy(update=own))
    return profile.model_copy(update=changed)


def _times(cost: float | None, factor: float) -> float | None:
    return (
        None if cost is None else round(cost * factor) if isinstance(cost, int) else cost * factor
    )
