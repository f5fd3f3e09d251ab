"""What is said of the device that a profile was measured on, or estimated for."""

from planner.formats.plan import Plan
from planner.formats.profile import Device


def device_words(device: Device, own: str = "") -> str:
    """Name a device and its kind, and say where its kernels were not measured; `own` follows the
    kind.
    """
    words = f"{device.name} ({device.kind}{own})"
    unmeasured = unmeasured_words(device)
    if unmeasured is None:
        return words
    return f"{words}; {unmeasured}"


def unmeasured_words(device: Device) -> str | None:
    """Say whose kernels stand for those of an estimate's device; None where they are its own."""
    if device.shares_of is None:
        return None
    return f"not all of its kernels were measured: the others are priced as on {device.shares_of}"


def unmeasured_in_plan(plan: Plan) -> str | None:
    """Say the same of each kind of GPU that a plan is for; None where all were measured."""
    kinds = plan.cluster.kinds
    if not kinds:
        return unmeasured_words(plan.device)
    words = [
        f"not all of {kind.name} were measured: the others are priced as on {kind.shares_of}"
        for kind in kinds
        if kind.shares_of is not None
    ]
    return "; ".join(words) or None
