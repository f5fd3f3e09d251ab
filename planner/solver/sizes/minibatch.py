"""Samples per update where nobody says: as many tokens as models of this size are trained with.

Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1: 0.5, 1 and 2 million from no,
1 and 5 billion parameters on. BLOOM (Le Scao et al. 2022) and Llama 3 (Llama team 2024): 4 million
from 100 billion on.

Where most of a model is frozen, adapters are trained: on minibatches of 16 samples, as in Dettmers
et al. 2023, "QLoRA", appendix B, of models of 7 to 65 billion parameters.
"""

import math
from collections.abc import Mapping

from planner.errors import InputError
from planner.formats.names import FLOAT_BYTES
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.options.verbs import SAMPLES
from planner.plan.lengths import mean_tokens
from planner.schedule.instructions import MICROBATCHES_PER_GPU

# By the least parameters, of which the first that a model has counts.
MINIBATCH_TOKENS: Mapping[float, int] = {
    100e9: 4_000_000,
    5e9: 2_000_000,
    1e9: 1_000_000,
    0: 500_000,
}
HALVES = ("bfloat16", "float16")
FINE_TUNED_SAMPLES = 16
# Of the bytes of all weights: adapters have a hundredth of them or so.
MOST_TRAINED_SHARE = 0.2


def minibatch_for(
    options: SolveOptions, tokens: int | None, profile: Profile, gpus: int
) -> int | None:
    """Return the samples of a minibatch, whole microbatches of the profile; None where the schedule
    divides none.

    Args:
        options: whose `minibatch` counts, if it has one.
        tokens: about so many, in place of the usual ones.
        profile: of the model.
        gpus: which get equally many samples, if there are enough; only then can replicas divide
            gradients and weights.

    Raises:
        InputError: for tokens where `minibatch` says the same, or where the model reads none.
    """
    tokens_per_sample = mean_tokens(profile)
    if tokens is not None:
        _check_tokens(options, tokens, profile)
    if options.minibatch is not None or not options.order.divides:
        return options.minibatch

    microbatch = profile.microbatch_size or 1
    if tokens_per_sample is None:
        return MICROBATCHES_PER_GPU * gpus * microbatch * max(1, round(SAMPLES / microbatch))

    samples = (tokens or usual_tokens(profile)) / tokens_per_sample
    if tokens is None and trains_adapters(profile):
        samples = max(FINE_TUNED_SAMPLES, gpus * microbatch)
    step = math.lcm(microbatch, odd_part(gpus))
    if step > samples:
        step = microbatch
    doublings = max(0, round(math.log2(samples / step)))
    return step << doublings


def trains_adapters(profile: Profile) -> bool:
    """Return whether most of the model is frozen, so that little beside it is trained."""
    weight_bytes = sum(layer.weight_bytes for layer in profile.layers)
    trained_bytes = sum(layer.gradient_bytes for layer in profile.layers)
    return 0 < trained_bytes < MOST_TRAINED_SHARE * weight_bytes


def usual_tokens(profile: Profile) -> int:
    """Return the tokens of a minibatch for a model of so many parameters."""
    bytes_each = 2 if profile.dtype in HALVES else FLOAT_BYTES
    parameters = sum(layer.weight_bytes for layer in profile.layers) / bytes_each
    return next(tokens for least, tokens in MINIBATCH_TOKENS.items() if parameters >= least)


def odd_part(number: int) -> int:
    """Return the largest odd number that divides another one: 3 of 24."""
    return number // (number & -number)


def _check_tokens(options: SolveOptions, tokens: int, profile: Profile) -> None:
    why = None
    if options.minibatch is not None:
        why = "`minibatch` says the same"
    elif mean_tokens(profile) is None:
        why = f"'{profile.model}' reads no tokens"

    if why is not None:
        raise InputError(
            f"`tokens={tokens}` makes no minibatch, because {why}", hint="leave out `tokens`"
        )
