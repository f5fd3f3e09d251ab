"""Profiles of models whose lengths vary: costs at a few lengths, a fit of each, and how often each
length comes.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.formats.profile import Fit, Layer, LayerFits, Lengths, Profile
from planner.model.generators import seeded
from planner.model.lengths import varying
from planner.model.samplers import BucketSampler
from planner.model.spec import TrainingSpec
from planner.plan.lengths import terms

SAMPLES = 1024  # of the data, at most, whose lengths a profile lists
# and the values that a layer passes on
_FITTED = ("forward_s", "backward_s", "saved_bytes", "flops")
_MOST_SHARES = 4  # of a fit that are not 0
_SIMPLER = 0.01  # how much more the residual of a simpler fit may be
Floats = NDArray[np.float64]


def other_lengths(spec: TrainingSpec) -> list[dict[str, int]]:
    """Return the lengths to profile beside the greatest: see `varying`."""
    found, greatest = varying(spec, 2), {name: most for name, (_, most) in spec.lengths().items()}
    return [] if found is None else [dict(each) for each, _ in found.examples if each != greatest]


def with_lengths(profile: Profile, others: Sequence[Profile], spec: TrainingSpec) -> Profile:
    """Return a profile at the greatest lengths with fits over these and `other_lengths`, at which
    the others are.

    A profile of a model without lengths that vary is returned as it is.
    """
    between = spec.lengths()
    if not between:
        return profile
    least, most = zip(*between.values(), strict=True)
    points = (most, *(tuple(each.values()) for each in other_lengths(spec)))
    costs = [
        [cost for layer in each.layers for cost in _costs(layer)] for each in (profile, *others)
    ]
    with seeded(0):  # the dataset, the sampler and collate may draw
        data = _samples(spec, profile.microbatch_size or 1)
    fits = iter(fitted(np.array(terms(points, most)), np.array(costs, dtype=np.float64)))
    lengths = Lengths(
        names=tuple(between),
        least=least,
        most=most,
        profiled=points,
        layers=tuple(_layer_fits(layer, fits) for layer in profile.layers),
        **data,
    )
    return profile.model_copy(update={"lengths": lengths})


def _costs(layer: Layer) -> list[float]:
    return [
        *(getattr(layer, name) or 0 for name in _FITTED),
        *(value.output_bytes for value in layer.outputs),
    ]


def _layer_fits(layer: Layer, fits: Iterator[Fit]) -> LayerFits:
    own = dict(zip(_FITTED, fits, strict=False))
    return LayerFits(**own, outputs=tuple(islice(fits, len(layer.outputs))))


def fitted(at: Floats, costs: Floats) -> list[Fit]:
    """Fit each column of costs, whose first row is at the greatest lengths, as a sum of `terms`, a
    row for each length.

    Shares are never negative, so that no cost is between the lengths that were profiled, and least
    squares find them among a few terms. A fit of a lower degree is taken where it misses hardly
    more.
    """
    relative = np.divide(costs, costs[0], out=np.zeros_like(costs), where=costs[0] > 0)
    means = np.maximum(relative.mean(axis=0), np.finfo(np.float64).tiny)
    lengths = int(np.sqrt(2 * at.shape[1])) - 1
    best, missed = np.zeros((at.shape[1], costs.shape[1])), np.full(costs.shape[1], np.inf)
    for count in (1, 1 + lengths, at.shape[1]):
        found, least = best.copy(), missed - _SIMPLER
        for size in range(1, min(count, _MOST_SHARES) + 1):
            for chosen in combinations(range(count), size):
                some = at[:, chosen]
                shares = np.linalg.lstsq(some, relative, rcond=None)[0]
                residual = np.sqrt(np.square(some @ shares - relative).mean(axis=0)) / means
                better = (shares >= 0).all(axis=0) & (residual < least)
                least[better] = residual[better]
                found[:, better] = 0.0
                found[np.ix_(chosen, better)] = shares[:, better]
        changed = least < missed - _SIMPLER
        best[:, changed], missed[changed] = found[:, changed], least[changed]
    columns = zip((best.T + 0.0).tolist(), missed.tolist(), strict=True)  # no -0.0
    return [Fit(shares=tuple(shares), residual=residual) for shares, residual in columns]


def _samples(spec: TrainingSpec, size: int) -> dict[str, Any]:
    """Return two fields of `Lengths`: lengths of some samples of the data, and in which order
    training takes them.
    """
    between, data = spec.lengths(), spec.dataset()
    drawing = random.Random(0)
    if data is None:  # each microbatch has one length
        drawn = (
            [drawing.randint(*pair) for pair in between.values()]
            for _ in range(max(64, SAMPLES // size))
        )
        return {
            "order": "given",
            "samples": tuple(zip(*(each for each in drawn for _ in range(size)), strict=True)),
        }
    sampler, found = spec.sampler(size, 1, 0), varying(spec, 2)
    assert found is not None
    if sampler is None or isinstance(sampler, BucketSampler):
        order, many = "random" if sampler is None else "buckets", len(data)  # type: ignore[arg-type]  # as in training
        chosen = drawing.sample(range(many), min(many, SAMPLES))
    else:
        order, chosen = "given", list(islice(sampler, SAMPLES))
    rows = (
        found.named(spec.collate([data[index]]), f"sample {index} of dataset()") for index in chosen
    )
    return {"order": order, "samples": tuple(zip(*rows, strict=True))}
