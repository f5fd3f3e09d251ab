"""Export a plan as arguments for Megatron-LM, whose stages are counts of transformer layers."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from planner.errors import PlanError
from planner.exports.limits import comment, equal_degrees, microbatches_per_pipeline, remarks, shards_everywhere
from planner.formats.plan import Plan

SYSTEM = "Megatron"
_BLOCK = re.compile(r"(?:(?P<stem>.+?)\.)?(?P<number>\d+)\.")


@dataclass(frozen=True)
class LayerCounts:
    """Transformer layers of each stage; `stem` is the name of their list in the model."""

    stem: str
    counts: tuple[int, ...]


def megatron_arguments(plan: Plan) -> str:
    """Write arguments for Megatron-LM's command line, one per line, after comments.

    Raises:
        PlanError: if the stages are not counts of transformer layers, or need what Megatron cannot express.
    """
    degrees = equal_degrees(plan, SYSTEM)
    replicas, workers, stages = degrees.replicas, degrees.pipeline, len(plan.stages)
    if any(plan.schedule.worker_of(stage, workers) != stage % workers for stage in range(stages)):
        raise PlanError(
            f"Megatron-LM gives stage s to worker s mod {workers}, and {plan.schedule} does not",
            hint="solve with `schedule=interleaved`",
        )
    layers = layer_counts(plan)
    microbatches = microbatches_per_pipeline(plan, replicas, SYSTEM)
    said = [
        f"{plan.model} for Megatron-LM: {', '.join(map(str, layers.counts))} of the layers '{layers.stem}' in "
        f"{'the only stage' if len(plan.stages) == 1 else f'the {len(plan.stages)} stages'}, {replicas} of each, "
        f"{plan.workers} workers.",
        *remarks(plan, SYSTEM),
    ]
    if not plan.schedule.alternates:
        said.append(f"Megatron runs 1F1B with a flush, where the plan is for {plan.schedule}.")
    recomputing = _recomputing(plan, said)
    if plan.cluster.sequence_parallel and degrees.tensor > 1:
        recomputing.append("--sequence-parallel")
    if shards_everywhere(plan, SYSTEM, said):
        recomputing.append("--use-distributed-optimizer")
    chosen = [
        f"--num-layers {sum(layers.counts)}",
        f"--pipeline-model-parallel-size {workers}",
        *([f"--tensor-model-parallel-size {degrees.tensor}"] if degrees.tensor > 1 else []),
        *_layout(plan, layers.counts),
    ]
    chosen += recomputing
    if plan.microbatch_size is not None:
        chosen.append(f"--micro-batch-size {plan.microbatch_size}")
        chosen.append(f"--global-batch-size {plan.microbatch_size * microbatches * replicas}")
    return "\n".join([comment(said), *chosen]) + "\n"


def _recomputing(plan: Plan, said: list[str]) -> list[str]:
    """Write which transformer layers recompute: Megatron takes the same number in every stage, the first ones."""
    again = [[layer for group in stage.recompute_groups for layer in group] for stage in plan.stages]
    units = [len({_block(layer) for layer in layers} - {None}) for layers in again]
    if not any(units):
        return []
    if len(set(units)) > 1:
        said.append(f"{', '.join(map(str, units))} layers of the stages recompute; Megatron takes one number for all.")
    if max(units) >= max(layer_counts(plan).counts):
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {max(units)}"]


def layer_counts(plan: Plan) -> LayerCounts:
    """Count the transformer layers of each stage: modules numbered in a list, "h.0.attn", "h.0.mlp", "h.1.attn", ...

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
                raise PlanError(
                    f"layer '{layer}' is in stage {index}, but Megatron has everything before '{stem}.0' in the first "
                    "stage and everything after the list in the last",
                    hint=f"keep it with its neighbours: solve with `together={_end_layer(plan, not place)},{layer}`",
                )
    counts = [0] * len(plan.stages)
    for index in place.values():
        counts[index] += 1
    return LayerCounts(stem, tuple(counts))


def _block(layer: str) -> tuple[str, int] | None:
    found = _BLOCK.match(layer)
    return None if found is None else (found["stem"] or "", int(found["number"]))


def _end_layer(plan: Plan, first: bool) -> str:
    return plan.stages[0].layers[0] if first else plan.stages[-1].layers[-1]


def _layout(plan: Plan, counts: tuple[int, ...]) -> list[str]:
    """Write the layout of unequal stages: E embedding, t a transformer layer, L loss, | between stages."""
    chunks = plan.chunks
    if len(set(counts)) == 1:
        return [f"--num-layers-per-virtual-pipeline-stage {counts[0]}"] if chunks > 1 else []
    stages = ["t" * count for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "L"
    return [f'--pipeline-model-parallel-layout "{"|".join(stages)}"']
