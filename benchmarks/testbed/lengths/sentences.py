"""Lengths of sentence pairs, generated: as in WMT'16 English to German, and two other
distributions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp
from statistics import NormalDist

LONGEST = 50  # longer sentences are left out, as the published GNMT does in training
SHORTEST = 4

Pair = tuple[int, int]  # words of the source and of the target


@dataclass(frozen=True)
class Distribution:
    """Log-normal lengths of sources; a target's is its source's times a log-normal ratio."""

    source_mean: float
    target_mean: float
    spread: float  # standard deviation of the logarithm of a source's length
    ratio_spread: float  # of the logarithm of the ratio
    longest: int = LONGEST


# The means are those of the 4.5 million pairs of WMT'16; see README.md for the source and what is
# assumed.
WMT = Distribution(23.0, 21.3, 0.6, 0.2)
DISTRIBUTIONS = {
    "wmt": WMT,
    "narrow": Distribution(30.0, 30.0, 0.25, 0.1),
    "long tail": Distribution(12.0, 16.0, 0.8, 0.3),
}


def pairs(of: Distribution, count: int, seed: int = 0) -> list[Pair]:
    """Return so many pairs, none of which is longer than the longest or shorter than four words.

    Lengths of sources are the distribution's quantiles in random order, so that few pairs have its
    mean and its tail.
    """
    draw, source = random.Random(seed), NormalDist(0.0, of.spread)
    found: list[Pair] = []
    # Those that are too long leave gaps, so more are made than are kept.
    for number in range(2 * count):
        words = of.source_mean * exp(
            source.inv_cdf((number + 0.5) / (2 * count)) - of.spread**2 / 2
        )
        ratio = (
            of.target_mean
            / of.source_mean
            * exp(draw.gauss(-(of.ratio_spread**2) / 2, of.ratio_spread))
        )
        pair = round(words), round(words * ratio)
        if max(pair) <= of.longest:
            found.append((max(SHORTEST, pair[0]), max(SHORTEST, pair[1])))
    draw.shuffle(found)
    return found[:count]
