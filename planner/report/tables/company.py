"""Say in what company a profile was measured, and what that means for a plan."""

from __future__ import annotations

from collections.abc import Iterator

from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.report.tables.profile import disturbance_words

NOT_MODELLED = (
    "the workers compute on all cores of their host, which also move the messages: the prediction counts the time of "
    "the messages, and not what else this may cost, such as waiting for a core, which takes up to a fifth of the speed "
    "where microbatches compute for a few milliseconds only"
)


def company_notes(plan: Plan, profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield why workers may be slower or faster than a plan says, each with a hint, or ""."""
    if words := disturbance_words(profile):
        hint = "profile again while nothing else runs"
        yield f"the profile was taken on a busy machine ({words}): its times may be too long", hint
    device, measured = profile.device, profile.provenance.source == "measured"
    if device.kind != "cpu" or not measured or plan.workers == 1:
        return
    if (device.processes or 1) == 1:
        yield (
            f"the profile is of one process that had its host for itself; where workers share a host's cores and "
            f"memory, all {plan.workers} are slower than the plan says",
            f"for workers on one host, profile with: plan profile MODEL `processes={plan.workers}`",
        )
    elif plan.cluster.overlap:
        yield (
            f"the profile is of {device.processes} workers that share a host, and the plan takes messages to need "
            "none of its cores",
            "where workers compute on all of them, give `overlap=False`, or measure the links: plan profile `links`",
        )
    else:
        yield NOT_MODELLED, ""
