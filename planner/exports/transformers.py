"""Export plans to Megatron-LM and torchtitan, which cut transformers between the layers of a numbered list."""

from __future__ import annotations

import json
import re
from collections import defaultdict

from planner.errors import PlanError
from planner.exports.limits import comment, model_remarks, target_of
from planner.formats.plan import Plan

_BLOCK = re.compile(r"((?:(.+?)\.)?(\d+))(?:\.|$)")  # "h.0" of "h.0.attn", the name of its list, and its number


def megatron_arguments(plan: Plan) -> str:
    """Write arguments for Megatron-LM's command line, one per line, after comments.

    Raises:
        PlanError: if the stages are not counts of transformer layers, or need what Megatron cannot express.
    """
    target, stages = target_of(plan, "Megatron"), len(plan.stages)
    if any(plan.schedule.worker_of(stage, target.pipeline) != stage % target.pipeline for stage in range(stages)):
        raise PlanError(
            f"Megatron-LM gives stage s to worker s mod {target.pipeline}, and {plan.schedule} does not",
            hint="solve with `schedule=interleaved`",
        )
    stem, counts = _layer_counts(plan)
    said = [
        f"{plan.model} for Megatron-LM: {', '.join(map(str, counts))} of the layers '{stem}' in "
        f"{'the only stage' if stages == 1 else f'the {stages} stages'}, {target.replicas} of each, "
        f"{plan.workers} workers.",
        *target.remarks,
        *model_remarks(plan, "Megatron"),
    ]
    if not plan.schedule.alternates:
        said.append(f"Megatron runs 1F1B with a flush, where the plan is for {plan.schedule}.")
    chosen = [f"--num-layers {sum(counts)}", f"--pipeline-model-parallel-size {target.pipeline}"]
    if target.tensor > 1:
        chosen.append(f"--tensor-model-parallel-size {target.tensor}")
    if len(set(counts)) > 1:  # E embedding, t a transformer layer, L loss, | between stages
        layout = "|".join("t" * count for count in counts)
        chosen.append(f'--pipeline-model-parallel-layout "E{layout}L"')
    elif plan.chunks > 1:
        chosen.append(f"--num-layers-per-virtual-pipeline-stage {counts[0]}")
    # Megatron recomputes the same number of layers in every stage, the first ones.
    again = [[layer for group in stage.recompute_groups for layer in group] for stage in plan.stages]
    units = [len({_block(layer) for layer in layers} - {None}) for layers in again]
    if len(set(units)) > 1:
        said.append(f"{', '.join(map(str, units))} layers of the stages recompute; Megatron takes one number for all.")
    if any(units):
        every = max(units) >= max(counts)
        method = "uniform --recompute-num-layers 1" if every else f"block --recompute-num-layers {max(units)}"
        chosen.append(f"--recompute-granularity full --recompute-method {method}")
    if plan.cluster.sequence_parallel and target.tensor > 1:
        chosen.append("--sequence-parallel")
    if target.sharded:
        chosen.append("--use-distributed-optimizer")
    if plan.microbatch_size is not None:
        chosen.append(f"--micro-batch-size {plan.microbatch_size}")
        chosen.append(f"--global-batch-size {plan.microbatch_size * target.microbatches * target.replicas}")
    return "\n".join([comment(said), *chosen]) + "\n"


def _layer_counts(plan: Plan) -> tuple[str, list[int]]:
    """Count the transformer layers of each stage: modules numbered in a list, "h.0.attn", "h.0.mlp", "h.1.attn", ...

    Returns:
        The name of the list in the model, and the counts.

    Raises:
        PlanError: if there are none, if a cut is inside one, or if a stage between the first and the last has other
            layers.
    """
    numbers = [[_block(layer) for layer in stage.layers] for stage in plan.stages]
    blocks: defaultdict[str, set[int]] = defaultdict(set)
    for found in (block for stage in numbers for block in stage if block is not None):
        blocks[found[0]].add(found[1])
    if not blocks or max(map(len, blocks.values())) < 2:
        raise PlanError(
            f"Megatron divides transformers by layers, and '{plan.model}' has no numbered list of layers",
            hint="use `system=torch-pipelining`",
        )
    stem = max(blocks, key=lambda name: len(blocks[name]))
    place: dict[int, int] = {}
    for index, stage in enumerate(numbers):
        for layer, block in zip(plan.stages[index].layers, stage, strict=True):
            if block is not None and block[0] == stem:
                if place.setdefault(block[1], index) != index:
                    raise PlanError(
                        f"the cut before stage {index} is inside '{stem}.{block[1]}', and Megatron cuts between layers",
                        hint="forbid cuts inside: solve with `no_cut_after="
                        f"{plan.stages[index - 1].layers[-1]}`; or profile with blocks(model) in the model file",
                    )
            elif index != (0 if not place else len(plan.stages) - 1):
                neighbour = plan.stages[-1].layers[-1] if place else plan.stages[0].layers[0]
                raise PlanError(
                    f"layer '{layer}' is in stage {index}, but Megatron has everything before '{stem}.0' in the first "
                    "stage and everything after the list in the last",
                    hint=f"keep it with its neighbours: solve with `together={neighbour},{layer}`",
                )
    return stem, [list(place.values()).count(index) for index in range(len(plan.stages))]


def _block(layer: str) -> tuple[str, int] | None:
    found = _BLOCK.match(layer)
    # A module of a list that is itself a layer is none of a transformer: "features.3" of a convolutional network.
    return None if found is None or found[1] == layer else (found[2] or "", int(found[3]))


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
        parts, divided = _modules(plan)
        if divided:
            said.append(f"{' and '.join(divided)} must be a ModuleList or ModuleDict: torchtitan divides no other.")
        fields |= {
            "pipeline_parallel_schedule": plan.schedule.torch_name.removeprefix("Schedule"),
            "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": parts,
        }
    local = size * target.microbatches
    batch = {"local_batch_size": local, "global_batch_size": local * target.replicas}
    arguments = "".join(f"    {name}={json.dumps(value)},\n" for name, value in fields.items())
    return (
        f"{comment(said)}\nfrom torchtitan.config import ParallelismConfig\n\n"
        f"PARALLELISM = ParallelismConfig(\n{arguments})\nBATCH = {json.dumps(batch)}\n"
    )


def _modules(plan: Plan) -> tuple[list[list[str]], list[str]]:
    """Return the modules of each stage, and the lists of modules that the cuts divide.

    torchtitan's splitter keeps or drops the direct children of the model, and of a ModuleList or ModuleDict among them
    its elements: it knows "layers.0" and "patch_embed", not "patch_embed.proj". A plan does not say which children are
    such lists. So a child with numbered parts that is in one stage as a whole is named both ways.
    """
    found: dict[str, int] = {}
    children: defaultdict[str, set[int]] = defaultdict(set)
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            child, _, rest = layer.partition(".")
            number = rest.partition(".")[0]
            name = f"{child}.{number}" if number.isdigit() else child
            if name == "loss":
                continue
            if found.setdefault(name, index) != index:
                raise PlanError(
                    f"the cut before stage {index} is inside '{name}', and torchtitan divides the direct children of "
                    "a model, and lists among them between their elements",
                    hint="solve with `granularity=block`; or profile with blocks(model) in the model file",
                )
            children[child].add(index)
    divided = [child for child, stages in children.items() if len(stages) > 1]
    parts = []
    for place in range(len(plan.stages)):
        own = [name for name, index in found.items() if index == place]
        whole = (name.partition(".")[0] for name in own if "." in name)
        parts.append([*own, *dict.fromkeys(child for child in whole if child not in divided)])
    return parts, divided
