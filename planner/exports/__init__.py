"""Export plans to other pipeline systems, with remarks on what those cannot express."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from planner.arguments import checked
from planner.exports.deepspeed import deepspeed_file
from planner.exports.torch_pipelining import torch_pipelining_file
from planner.exports.transformers import megatron_arguments, torchtitan_config
from planner.formats.plan import Plan

System = Literal["torch-pipelining", "deepspeed", "megatron", "torchtitan"]

_WRITERS: dict[System, Callable[[Plan, str | None], str]] = {
    "torch-pipelining": torch_pipelining_file,
    "deepspeed": lambda plan, _: deepspeed_file(plan),
    "megatron": lambda plan, _: megatron_arguments(plan),
    "torchtitan": lambda plan, _: torchtitan_config(plan),
}


@checked
def export(plan: Plan, system: System, *, model: str | Path | None = None) -> str:
    """Return the plan in the form that another system takes; comments say what that does differently from the plan.

    Args:
        system: "torch-pipelining", a script for torchrun; "deepspeed", a PipelineModule with the plan's partition;
            "megatron", arguments for its command line; "torchtitan", its configuration in Python.
        model: the model file, which torch-pipelining's script reads.

    Raises:
        PlanError: for what the system cannot express, such as stages with different numbers of replicas.
        InputError: if the model file is needed and missing.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> two = planner.flat_cluster(gpus=2, bandwidth_bytes_per_s=1.25e9)
        >>> plan = planner.solve(profile, two, schedule="1f1b-flush", microbatches=4, max_stages=2)
        >>> script = planner.export(plan, "deepspeed", model="model.py")
        >>> "PipelineModule" in script
        True
    """
    return _WRITERS[system](plan, None if model is None else str(model))
