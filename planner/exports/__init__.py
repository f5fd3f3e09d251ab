"""Export plans to other pipeline systems, with remarks on what those cannot express."""

from collections.abc import Callable
from typing import Literal

from planner.arguments import checked
from planner.errors import InputError, did_you_mean
from planner.exports.transformers import megatron_arguments, torchtitan_config
from planner.formats.plan import Plan

System = Literal["megatron", "torchtitan"]

_WRITERS: dict[System, Callable[[Plan], str]] = {
    "megatron": megatron_arguments,
    "torchtitan": torchtitan_config,
}


@checked
def export(plan: Plan, system: System) -> str:
    """Return the plan in the form that another system takes; comments say what that does
    differently from the plan.

    Args:
        system: "megatron", arguments for its command line; "torchtitan", its configuration in
            Python.

    Raises:
        InputError: for another system.
        PlanError: for what the system cannot express, such as stages with different numbers of
            replicas.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> two = planner.flat_cluster(gpus=2, bandwidth_bytes_per_s=1.25e9)
        >>> plan = planner.solve(profile, two, schedule="1f1b-flush", microbatches=4, max_stages=2)
        >>> config = planner.export(plan, "torchtitan")
        >>> "data_parallel_replicate_degree=2" in config
        True
    """
    if system not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise InputError(
            f"plans are not written for '{system}'",
            hint=f"{did_you_mean(system, _WRITERS)}`system` is one of {known}",
        )
    return _WRITERS[system](plan)
