"""Samples of a minibatch where nobody says how many."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.solver.sizes.minibatch import minibatch_for
from tests.samples import layer, profile

MODEL = profile(layer("l", 1, 2), microbatch_size=1)


@pytest.mark.parametrize(
    ("parameters", "tokens_per_sample", "tokens", "gpus", "size", "samples"),
    [
        (1e8, 512, None, 8, 1, 1024),
        (2e9, 2048, None, 8, 2, 512),
        (7e9, 2048, None, 8, 1, 1024),
        (2e11, 4096, None, 8, 1, 1024),
        (7e9, 2048, 65536, 8, 1, 32),
        (7e9, 2048, 100, 8, 1, 1),
        (7e9, 2048, 100, 8, 2, 2),
        (7e9, None, None, 8, 2, 512),
        # Equally many for all GPUs, in whole microbatches.
        (7e9, 2048, None, 24, 1, 768),
        (7e9, 2048, None, 6, 4, 768),
        (2e9, 2048, None, 10, 3, 480),
        (2e9, 2048, 65536, 40, 1, 40),
        (2e9, 2048, 65536, 37, 1, 32),  # which is too many of them
        (7e9, None, None, 9, 3, 540),
    ],
)
def test_a_minibatch_has_as_many_tokens_as_such_models_are_trained_with(
    parameters: float,
    tokens_per_sample: int | None,
    tokens: int | None,
    gpus: int,
    size: int,
    samples: int,
) -> None:
    large = profile(layer("l", 1, 2, weight_bytes=int(4 * parameters)), microbatch_size=size)
    large = large.model_copy(update={"tokens_per_sample": tokens_per_sample})
    assert minibatch_for(SolveOptions(schedule=FLUSH), tokens, large, gpus) == samples


@pytest.mark.parametrize(
    ("trained_bytes", "gpus", "size", "samples"),
    [
        (10**8, 2, 1, 16),
        (10**8, 2, 4, 16),
        (10**8, 64, 1, 64),  # one for each GPU
        (10**8, 12, 1, 12),
        (10**8, 24, 1, 24),
        (0, 2, 1, 1024),  # nobody knows what is trained
        (15 * 10**9, 2, 1, 1024),
    ],
)
def test_adapters_are_trained_on_small_minibatches(
    trained_bytes: int, gpus: int, size: int, samples: int
) -> None:
    """However many parameters are frozen beside them."""
    large = profile(layer("l", 1, 2, weight_bytes=32 * 10**9), microbatch_size=size)
    frozen = large.layers[0].model_copy(update={"gradient_bytes": trained_bytes})
    large = large.model_copy(update={"tokens_per_sample": 2048, "layers": (frozen,)})
    assert minibatch_for(SolveOptions(schedule=FLUSH), None, large, gpus) == samples
    assert minibatch_for(SolveOptions(schedule=FLUSH), 65536, large, 2) == 32


def test_a_minibatch_is_given_once() -> None:
    asked = SolveOptions(schedule=FLUSH, minibatch=16)
    assert minibatch_for(asked, None, MODEL, 8) == 16
    assert minibatch_for(SolveOptions(schedule="1f1b"), None, MODEL, 8) is None
    with pytest.raises(
        InputError, match="`tokens=4096` makes no minibatch, because `minibatch` says the same"
    ):
        minibatch_for(asked, 4096, MODEL, 8)
    with pytest.raises(InputError, match="reads no tokens"):
        minibatch_for(SolveOptions(schedule=FLUSH), 4096, MODEL, 8)
