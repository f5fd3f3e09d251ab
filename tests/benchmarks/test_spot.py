"""A day of a spot market, simulated by its trace."""

from __future__ import annotations

import random

from benchmarks.published.spot.__main__ import WAYS, ideal, read_trace, train


def test_copies_keep_more_of_a_spot_market_than_the_same_checkpoints_alone() -> None:
    trace, end_s, speeds = (
        read_trace(),
        24.5 * 3600,
        {count: 20.0 / count for count in range(1, 13)},
    )
    kept = {
        way.name: train(trace, end_s, speeds, 5e9, way, random.Random(1))[-1][1] for way in WAYS
    }
    with_copies, best, alone, seldom = (
        kept[way.name] / ideal(trace, end_s, speeds) for way in WAYS
    )
    assert 1.0 > with_copies > alone > seldom > 0.3
    assert best > alone
    # By hand: 10 s to load, 20 s to start, and 13 minibatches of 5 s, of which the first ten are in
    # a copy.
    two = train([(0.0, 4), (100.0, 3)], 1000.0, {4: 5.0, 3: 6.0}, 6.25e9, WAYS[0], random.Random(1))
    assert two[1] == (100.0, 10.0)
