"""Model FLOP utilisation: FLOPs of a minibatch / (seconds of a minibatch · GPUs · peak FLOP/s of
one).

FLOPs are those of forward and backward, without recomputation (Chowdhery et al. 2022, PaLM,
appendix B).
"""

from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DTYPES, find_device


def utilisation(
    profile: Profile, microbatches: int, seconds_per_minibatch: float, gpus: int
) -> float | None:
    """Return the utilisation of so many GPUs; None where FLOPs or peak are not known."""
    peak = peak_flops_per_s(profile)
    flops = profile.flops
    if peak is None or not flops or seconds_per_minibatch <= 0:
        return None
    return flops * microbatches / (seconds_per_minibatch * gpus * peak)


def peak_flops_per_s(profile: Profile) -> float | None:
    """Return the peak of the profile's device in its data type; None where it is not known."""
    if profile.device.kind == "cpu":
        return None
    if profile.device.peak_flops_per_s is not None:
        return profile.device.peak_flops_per_s
    wanted = profile.autocast or profile.master_weights or profile.dtype
    device = find_device(profile.device.name)
    dtype = next((dtype for dtype in DTYPES if dtype == wanted), None)
    if device is None or dtype is None:
        return None
    return device.peak(dtype)
