"""Do the measured times of the layers add up to the time of the whole step?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from planner.formats.profile import Layer, Profile, WholeStep
from planner.selftest.lab import Lab, location
from planner.selftest.rows import Case, Check, Outcome, judged
from planner.units import format_seconds

LIMIT = 0.10
SECONDS = 8.0  # of measuring, each time
TRIES = 3  # on a busy machine a measurement may be disturbed
# Enough samples for a GPU to be at work and not to wait for the host.
MODELS = {"convolutional": ("build_wide", 16, 256), "transformer": ("build_model", 8, 64)}


def _cases(lab: Lab) -> Iterator[Case]:
    for name, (builder, on_cpu, on_cuda) in MODELS.items():
        yield Case(name, partial(_sum, lab, location(name, builder), on_cuda if lab.cuda else on_cpu))


def _sum(lab: Lab, model: str, batch_size: int) -> Outcome:
    """Profile until the sum is near enough, a few times at most."""
    for number in range(TRIES):
        profile = lab.profile(model, batch_size, SECONDS * (number + 1))
        outcome = judge(profile)
        if outcome.result == "passed":
            break
    return outcome


def judge(profile: Profile) -> Outcome:
    """Compare the sum of the layers with the whole step."""
    whole = profile.whole_step
    if whole is None:
        return judged(False, "the profile has no whole step")
    clock, wanted_s, layers_s = "seconds", _of_whole(whole), sum(map(_of_layer, profile.layers))
    threads_s = [each for each in map(_on_the_thread, profile.layers) if each is not None]
    whole_thread_s = _on_the_thread(whole)
    if whole_thread_s is not None and len(threads_s) == len(profile.layers):
        # What other processes took of the cores does not count in these.
        clock, wanted_s, layers_s = "processor time", whole_thread_s, sum(threads_s)
    error = layers_s / wanted_s - 1
    text = (
        f"the sum of {len(profile.layers)} layers is {format_seconds(layers_s)} of {clock}, the whole step "
        f"{format_seconds(wanted_s)}: {error:+.1%} (limit {LIMIT:.0%})"
    )
    return judged(abs(error) <= LIMIT, text, error, LIMIT)


def _of_whole(whole: WholeStep) -> float:
    return whole.forward_s + whole.backward_s + whole.update_s


def _of_layer(layer: Layer) -> float:
    return layer.forward_s + layer.backward_s + layer.update_s


def _on_the_thread(part: WholeStep | Layer) -> float | None:
    """Return the processor time of forward and backward; None where it was not measured, as on a GPU."""
    if part.forward_thread_s is None or part.backward_thread_s is None:
        return None
    return part.forward_thread_s + part.backward_thread_s


CHECK = Check("times", "do the layers' times add up to the step's?", _cases)
