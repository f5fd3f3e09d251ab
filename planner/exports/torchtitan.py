"""Export a plan as torchtitan's configuration: its degrees, its schedule and the modules of each stage."""

from __future__ import annotations

import json
import re

from planner.errors import PlanError
from planner.exports.limits import comment, model_remarks, target_of
from planner.formats.plan import Plan

_BLOCK = re.compile(r"((?:.+?\.)?\d+)(?:\.|$)")
_NO_MODULES = ("loss",)


def torchtitan_config(plan: Plan) -> str:
    """Write a Python file with torchtitan's ParallelismConfig, for a function of its config_registry.

    Raises:
        PlanError: for what torchtitan cannot express.
    """
    target = target_of(plan, "torchtitan")
    said = [
        f"{plan.model} for torchtitan: {plan.config} on {plan.workers} workers. Give it to a function of the model's "
        "config_registry: parallelism=PARALLELISM, training=TrainingConfig(**BATCH).",
        "The names of modules are those of the planned model: torchtitan's model must have the same.",
        *target.remarks,
        *model_remarks(plan, "torchtitan"),
    ]
    if target.sharded:
        said.append("torchtitan divides weights and gradients, too (FSDP), not the optimizer's state alone.")
    if any(stage.recompute for stage in plan.stages):
        said.append("Some stages recompute: set activation_checkpoint of the job.")
    size = plan.microbatch_size or 1
    fields: dict[str, object] = {
        "pipeline_parallel_degree": target.pipeline,
        "tensor_parallel_degree": target.tensor,
        "data_parallel_replicate_degree": 1 if target.sharded else target.replicas,
        "data_parallel_shard_degree": target.replicas if target.sharded else 1,
    }
    if target.pipeline > 1:
        fields |= {
            "pipeline_parallel_schedule": plan.schedule.torch_name.removeprefix("Schedule"),
            "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": _modules(plan),
        }
    local = size * target.microbatches
    batch = {"local_batch_size": local, "global_batch_size": local * target.replicas}
    arguments = "".join(f"    {name}={json.dumps(value)},\n" for name, value in fields.items())
    return (
        f"{comment(said)}\nfrom torchtitan.config import ParallelismConfig\n\n"
        f"PARALLELISM = ParallelismConfig(\n{arguments})\nBATCH = {json.dumps(batch)}\n"
    )


def _modules(plan: Plan) -> list[list[str]]:
    """Return the modules of each stage: blocks of a numbered list whole, and all others as they are."""
    found: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            block = _BLOCK.match(layer)
            name = layer if block is None else block[1]
            if name not in _NO_MODULES and found.setdefault(name, index) != index:
                raise PlanError(
                    f"the cut before stage {index} is inside '{name}', and torchtitan cuts between blocks",
                    hint="solve with `granularity=block`; or profile with blocks(model) in the model file",
                )
    return [[name for name, index in found.items() if index == stage] for stage in range(len(plan.stages))]
