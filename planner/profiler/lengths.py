"""Profiles of models whose lengths vary: costs at a few lengths, a fit of each, and how often each
length comes.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.formats.files import replace
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
    varied = varying(spec, 2)
    if varied is None:
        return []
    greatest = {name: most for name, (_, most) in spec.lengths().items()}
    return [dict(lengths) for lengths, _ in varied.examples if lengths != greatest]


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
        samples = _samples(spec, profile.microbatch_size or 1)
    fits = iter(fitted(np.array(terms(points, most)), np.array(costs, dtype=np.float64)))
    lengths = Lengths(
        names=tuple(between),
        least=least,
        most=most,
        profiled=points,
        layers=tuple(_layer_fits(layer, fits) for layer in profile.layers),
        order=samples.order,
        samples=samples.by_name,
    )
    return replace(profile, lengths=lengths)


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
    best = _Shares.none(at.shape[1], costs.shape[1])
    # Constants, what grows with a length, and what grows with a product of two.
    lengths = int(np.sqrt(2 * at.shape[1])) - 1
    for terms_of_degree in (1, 1 + lengths, at.shape[1]):
        # A higher degree must miss less by this margin.
        fit = _Shares(best.shares.copy(), best.missed - _SIMPLER)
        for chosen in _choices(terms_of_degree):
            fit.improve(at, relative, chosen)
        best.take(fit, fit.missed < best.missed - _SIMPLER)

    shares = (best.shares.T + 0.0).tolist()  # no -0.0
    columns = zip(shares, best.missed.tolist(), strict=True)
    return [Fit(shares=tuple(own), residual=residual) for own, residual in columns]


def _choices(terms_of_degree: int) -> Iterator[tuple[int, ...]]:
    """Yield which terms a fit may have at once, few of them first."""
    for size in range(1, min(terms_of_degree, _MOST_SHARES) + 1):
        yield from combinations(range(terms_of_degree), size)


@dataclass
class _Shares:
    """Fits of several costs.

    Attributes:
        shares: (terms, costs).
        missed: (costs,): root mean square of the residuals, relative to the mean cost.
    """

    shares: Floats
    missed: Floats

    @classmethod
    def none(cls, terms: int, costs: int) -> "_Shares":
        """Return fits that any other one is better than."""
        return cls(np.zeros((terms, costs)), np.full(costs, np.inf))

    def improve(self, at: Floats, costs: Floats, chosen: tuple[int, ...]) -> None:
        """Take the least squares of some terms for the costs that they miss less."""
        part = at[:, chosen]
        shares = np.linalg.lstsq(part, costs, rcond=None)[0]
        means = np.maximum(costs.mean(axis=0), np.finfo(np.float64).tiny)
        missed = np.sqrt(np.square(part @ shares - costs).mean(axis=0)) / means

        better = (shares >= 0).all(axis=0) & (missed < self.missed)
        self.missed[better] = missed[better]
        self.shares[:, better] = 0.0
        self.shares[np.ix_(chosen, better)] = shares[:, better]

    def take(self, other: "_Shares", which: NDArray[np.bool_]) -> None:
        """Take others' fits of some costs."""
        self.shares[:, which] = other.shares[:, which]
        self.missed[which] = other.missed[which]


@dataclass(frozen=True)
class _Samples:
    """Lengths of some samples of the data, by name, and in which order training takes them."""

    order: Literal["given", "random", "buckets"]
    rows: Sequence[tuple[int, ...]]  # of each sample

    @property
    def by_name(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self.rows, strict=True))


def _samples(spec: TrainingSpec, size: int) -> _Samples:
    """Draw samples, for microbatches of `size`."""
    drawing = random.Random(0)
    data = spec.dataset()
    if data is None:
        return _Samples("given", _drawn_rows(spec, size, drawing))

    sampler = spec.sampler(size, 1, 0)
    if sampler is None or isinstance(sampler, BucketSampler):
        many = len(data)  # type: ignore[arg-type]  # as in training
        chosen = drawing.sample(range(many), min(many, SAMPLES))
    else:
        chosen = list(islice(sampler, SAMPLES))

    varied = varying(spec, 2)
    assert varied is not None
    rows = [
        varied.named(spec.collate([data[index]]), f"sample {index} of dataset()")
        for index in chosen
    ]
    if sampler is None:
        return _Samples("random", rows)
    return _Samples("buckets" if isinstance(sampler, BucketSampler) else "given", rows)


def _drawn_rows(spec: TrainingSpec, size: int, drawing: random.Random) -> Sequence[tuple[int, ...]]:
    """Return lengths of samples of microbatches, each of which has one length."""
    between = spec.lengths().values()
    rows = []
    for _ in range(max(64, SAMPLES // size)):
        lengths = tuple(drawing.randint(*pair) for pair in between)
        rows += [lengths] * size
    return rows
