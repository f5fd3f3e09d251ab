"""Lengths of batches that vary: which microbatches a plan is made for, and what these cost.

A microbatch is as long as its longest sample. A plan is made for some microbatches that are drawn
from the data, always the same ones. Searches take the mean of each cost over these; a simulation
takes each microbatch's own.
"""

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from operator import mul
from statistics import fmean
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.formats.files import replace
from planner.formats.plan_parts import PlannedLengths
from planner.formats.profile import DegreeCosts, Fit, Lengths, Profile, VaryingLengths

T = TypeVar("T")

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
    drawing = random.Random(0)
    rows = _drawn_samples(lengths, size, drawing)
    batches = _runs(rows, size)[: max(1, len(rows) // size)]
    if lengths.order == "buckets":
        minibatches = _runs(batches[:DRAWN], microbatches)
        drawing.shuffle(minibatches)
        # what is left is no minibatch, and would move those after it
        minibatches.sort(key=len, reverse=True)
        batches = [batch for minibatch in minibatches for batch in minibatch]

    longest = tuple(tuple(map(max, zip(*batch, strict=True))) for batch in batches[:DRAWN])
    fields = {name: getattr(lengths, name) for name in VaryingLengths.model_fields}
    return PlannedLengths(**fields, microbatches=longest)


def _drawn_samples(lengths: Lengths, size: int, drawing: random.Random) -> list[tuple[int, ...]]:
    """Return the lengths of samples, in the order in which batches of so many take them."""

    def relative(row: tuple[int, ...]) -> float:
        return sum(length / most for length, most in zip(row, lengths.most, strict=True))

    rows = list(zip(*lengths.samples, strict=True))
    if lengths.order == "given":
        return rows

    # Each sample equally often: what is drawn has the mean of the data.
    rows.sort(key=relative)
    wanted = DRAWN * size
    rows = [rows[number * len(rows) // wanted] for number in range(wanted)]
    if lengths.order == "random":
        drawing.shuffle(rows)
    return rows


def _runs(items: list[T], size: int) -> list[list[T]]:
    """Return runs of so many items, the last of what is left."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def planned(profile: Profile, microbatches: int = 1) -> PlannedLengths | None:
    """Draw the microbatches of plans with so many per minibatch; None where lengths do not vary."""
    if profile.lengths is None:
        return None
    return _planned(profile.lengths, profile.microbatch_size or 1, microbatches)


def planned_terms(lengths: PlannedLengths | None) -> Terms:
    """Return the terms of a plan's microbatches; none where lengths do not vary."""
    if lengths is None:
        return ()
    return terms(lengths.microbatches, lengths.most)


def mean_terms(profile: Profile) -> NDArray[np.float64]:
    return np.asarray(np.mean(planned_terms(planned(profile)), axis=0))


def mean_tokens(profile: Profile) -> int | None:
    """Return the tokens of a sample, without what pads it; None where the model takes none."""
    tokens = profile.tokens_per_sample
    lengths = profile.lengths
    if tokens is None or lengths is None:
        return tokens
    means = {
        most: round(fmean(own)) for most, own in zip(lengths.most, lengths.samples, strict=True)
    }
    return means.get(tokens, tokens)  # sequences of one length are as long as they are


def expected(profile: Profile) -> Profile:
    """Return the profile with the means of times over the drawn microbatches.

    What takes memory is that of the longest. Other kinds of devices, and ranks that divide layers,
    take as much less for a shorter batch.
    """
    lengths = profile.lengths
    if lengths is None:
        return profile
    terms = mean_terms(profile)

    def factors(shares: list[Fit]) -> list[float]:
        means: list[float] = (np.array([each.shares for each in shares]) @ terms).tolist()
        return means

    forward = factors([each.forward_s for each in lengths.layers])
    backward = factors([each.backward_s for each in lengths.layers])
    flops = factors([each.flops for each in lengths.layers])
    outputs = factors([(each.outputs or (each.forward_s,))[0] for each in lengths.layers])

    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * forward[number],
            backward_s=layer.backward_s * backward[number],
            forward_flops=_of_count(layer.forward_flops, flops[number]),
            backward_flops=_of_count(layer.backward_flops, flops[number]),
        )
        for number, layer in enumerate(profile.layers)
    )

    def divided(tensor: tuple[DegreeCosts, ...] | None) -> tuple[DegreeCosts, ...] | None:
        return tensor and tuple(
            replace(
                each,
                forward_s=tuple(map(mul, each.forward_s, forward)),
                backward_s=tuple(map(mul, each.backward_s, backward)),
                forward_reduced_bytes=_of_bytes(each.forward_reduced_bytes, outputs),
                backward_reduced_bytes=_of_bytes(each.backward_reduced_bytes, outputs),
            )
            for each in tensor
        )

    kinds = profile.kinds and tuple(
        replace(
            times,
            forward_s=tuple(map(mul, times.forward_s, forward)),
            backward_s=tuple(map(mul, times.backward_s, backward)),
            tensor=divided(times.tensor),
        )
        for times in profile.kinds
    )
    tokens = mean_tokens(profile)
    return replace(
        profile,
        layers=layers,
        kinds=kinds,
        tensor=divided(profile.tensor),
        tokens_per_sample=tokens,
    )


def _of_count(count: int | None, factor: float) -> int | None:
    if count is None:
        return None
    return round(count * factor)


def _of_bytes(sizes: Sequence[int], factors: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(size * factor) for size, factor in zip(sizes, factors, strict=True))
