"""Export plans to Megatron-LM and torchtitan, which cut transformers between the layers of a
numbered list.

Errors are for what no plan of theirs has, remarks for what they do differently.
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from planner.errors import PlanError
from planner.exports import megatron as words
from planner.formats.plan import Plan
from planner.plan.blocks import recomputes_parts
from planner.plan.rank_groups import sample_parts

# "h.0" of "h.0.attn", the name of its list, and its number
_BLOCK = re.compile(r"((?:(.+?)\.)?(\d+))(?:\.|$)")
# microbatches per stage if the plan has one per minibatch, for a bubble of a fifth
LEAST_PER_STAGE = 4


@dataclass(frozen=True)
class Target:
    """A plan as another system runs it: whole pipelines are copied, whose layers equal groups
    shard.
    """

    replicas: int  # of every stage
    pipeline: int  # workers, or groups of them, that a pipeline has
    tensor: int  # ranks of a group; those that have samples of their own are replicas instead
    context: int  # ranks of a group that shard sequences, beside those that shard layers
    size: int | None  # samples of a microbatch, if known
    microbatches: int  # that each copy of the pipeline runs between two updates
    sharded: bool  # whether the system must shard the optimizer's state: in all stages, or in none
    remarks: list[str]  # how its schedule and messages differ from the plan's


def target_of(plan: Plan, system: str) -> Target:
    """Return how a system that copies whole pipelines runs a plan; raise PlanError if it cannot."""
    for numbers, what in ((plan.replicas, "replicas"), (plan.degrees, "ranks")):
        if len(set(numbers)) > 1:
            problem = (
                f"{system} copies whole pipelines, so it has no form for '{plan.config}', "
                f"whose stages have "
            )
            problem += f"different numbers of {what}"
            raise PlanError(
                problem, hint="`plan train` runs it; `plan compare` prices straight pipelines"
            )

    if plan.stages[0].shards_gradients and system != "torchtitan":
        problem = (
            f"{system} has no form for replicas that shard gradients or weights, as those "
            f"of '{plan.config}' do"
        )
        raise PlanError(
            problem, hint="export with `system=torchtitan`, or solve with `shard_optimizer=never`"
        )

    if plan.cluster.offload is not None:
        raise PlanError(
            f"the export for {system} has no form for an optimizer in the memory of the host",
            hint="`plan fit` with `deepspeed=FILE` writes DeepSpeed's; or solve without `offload`",
        )

    replicas = plan.replicas[0]
    pipeline = plan.workers // len(plan.stages[0].ranks)
    ranks = [rank for stage in plan.stages[:pipeline] for rank in stage.ranks]
    if ranks != list(range(len(ranks))):
        problem = f"{system} numbers workers stage by stage, but the plan's ranks are {ranks}"
        raise PlanError(
            problem, hint="solve for one level, or list kinds of GPUs in the order of the stages"
        )

    several = plan.schedule.stashes and len(plan.stages) > 1
    microbatches, left = divmod(plan.microbatches, replicas)
    if plan.schedule.stashes:
        microbatches = 1
        if several:
            microbatches = LEAST_PER_STAGE * len(plan.stages)
    elif left:
        problem = (
            f"{system} gives each pipeline equally many microbatches, but "
            f"{plan.microbatches} cannot be split evenly over "
        )
        raise PlanError(
            f"{problem}{replicas} pipelines",
            hint=f"solve with `microbatches={(microbatches + 1) * replicas}`",
        )

    remarks = {
        f"The plan's schedule, {plan.schedule}, keeps the pipeline full by stashing weights. "
        f"{system} drains it before every update, so expect fewer samples/s than the plan "
        "predicts.": plan.schedule.asynchronous,
        f"Gradients are accumulated over {LEAST_PER_STAGE} microbatches per stage. The plan "
        f"updates after each one: "
        "adapt the learning rate.": several,
        f"The plan sends activations as {plan.cluster.compress}. {system} sends them as they are, "
        f"so links are busier "
        "than the plan predicts.": plan.cluster.compress != "none",
    }
    sharded = any(stage.shards_optimizer for stage in plan.stages)
    said = [text for text, holds in remarks.items() if holds]
    copies = sample_parts(plan)
    context = plan.context_ranks
    size = plan.microbatch_size and plan.microbatch_size // copies
    return Target(
        replicas * copies,
        pipeline,
        plan.ranks_per_replica // copies // context,
        context,
        size,
        microbatches,
        sharded,
        said,
    )


def shared_weights(plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """Return the names of shared weights by the stages that hold them, both ascending."""
    holders: dict[str, set[int]] = {}
    for shared in plan.shared:
        for name in shared.weights:
            holders.setdefault(name, set()).update(shared.stages)
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stages in sorted(holders.items()):
        found.setdefault(tuple(sorted(stages)), []).append(name)
    return found


def model_remarks(plan: Plan, system: str) -> list[str]:
    """Say what the user who builds the layers for the system must know."""
    several = [
        f"{len(t.values)} from stage {t.source} to {t.target}"
        for t in plan.transfers
        if len(t.values) > 1
    ]
    skips = [f"{t.source} to {t.target}" for t in plan.transfers if t.target > t.source + 1]
    degree = plan.ranks_per_replica // plan.context_ranks
    sharded = [stage.shards_optimizer for stage in plan.stages]
    over = "mean over the labels that count"
    if plan.loss is not None and plan.loss.over == "sum":
        over = "sum"
    remarks = {
        f"The model branches, and several values cross cuts ({', '.join(several)}): the layers "
        f"there must take and "
        "return these values as a tuple.": several,
        f"Values skip stages (from stage {', '.join(skips)}): the layers in between must pass "
        f"them on.": skips,
        **{
            f"Stages {', '.join(map(str, stages))} share {', '.join(names)}: tie them there, or "
            f"each stage trains its "
            "own copy.": True
            for stages, names in shared_weights(plan).items()
        },
        f"The loss is a {over}, and `plan train` weighs microbatches by it. {system} takes the "
        f"mean of their losses, "
        "which is another loss: weigh them in the loss function.": plan.loss is not None
        and plan.loss.weighs,
        f"The plan shards sequences over {plan.context_ranks} ranks, and shards optimizer states "
        f"over replicas alone; {system} does so over the ranks of a sequence, too, and needs less "
        "memory.": plan.divides_sequences,
        f"Layers are sharded over {degree} ranks. {system} decides which weights it shards; the "
        "plan's costs assume the model's own choice.": degree > 1 and not plan.by_samples,
        f"Of {plan.experts} experts of a layer, each of {degree} ranks has a part. {system} "
        f"reduces the gradients of other weights once per minibatch, where `plan train` does so "
        "for every microbatch.": plan.by_samples,
        f"The plan shards the optimizer's state in some stages; {system} does so in all of "
        "them.": any(sharded) and not all(sharded),
        f"The plan is for {plan.autocast} under autocast: use the same here.": plan.autocast,
        f"The plan is for weights in {plan.master_weights} with float32 masters: do so "
        "here.": plan.master_weights,
        f"The plan is for {plan.memory_format} weights and images: use the same "
        "here.": plan.memory_format,
        "The plan is for stages compiled with torch.compile: use the same here.": plan.compiled,
    }
    return [text for text, holds in remarks.items() if holds]


def comment(sentences: list[str], width: int = 100) -> str:
    return "\n".join(
        line
        for text in sentences
        for line in textwrap.wrap(f"# {text}", width, subsequent_indent="# ")
    )


def megatron_arguments(plan: Plan) -> str:
    """Write arguments for Megatron-LM's command line, one per line, after comments."""
    target = target_of(plan, "Megatron")
    stages = len(plan.stages)
    if any(
        plan.schedule.worker_of(stage, target.pipeline) != stage % target.pipeline
        for stage in range(stages)
    ):
        problem = (
            f"Megatron-LM gives stage s to worker s mod {target.pipeline}, and "
            f"{plan.schedule} does not"
        )
        raise PlanError(problem, hint="solve with `schedule=interleaved`")

    stem, counts = layer_counts(plan)
    said = [
        f"{plan.model} for Megatron-LM: {', '.join(map(str, counts))} of the layers '{stem}' in "
        f"{stages} stages, "
        f"{target.replicas} of each, {plan.workers} workers.",
        *target.remarks,
        *model_remarks(plan, "Megatron"),
    ]
    if not plan.schedule.alternates:
        said.append(f"Megatron runs 1F1B with a flush, where the plan is for {plan.schedule}.")
    even = len(set(counts)) == 1
    layout = "|".join("t" * count for count in counts)
    # Megatron recomputes the same number of layers in every stage, the first ones.
    units = [
        len({_block(layer) for layer in stage.recomputed_layers} - {None}) for stage in plan.stages
    ]
    if len(set(units)) > 1:
        said.append(
            f"{', '.join(map(str, units))} layers of the stages recompute; Megatron takes one "
            f"number for all."
        )

    in_parts = any(recomputes_parts(stage.layers, stage.recompute_groups) for stage in plan.stages)
    if in_parts:
        said.append(
            "Stages recompute a part of each layer; Megatron recomputes the attention between "
            "projections, of every layer."
        )

    every = max(units) >= max(counts)
    method = f"{words.METHOD} uniform {words.RECOMPUTED_LAYERS} 1"
    if not every:
        method = f"{words.METHOD} block {words.RECOMPUTED_LAYERS} {max(units)}"
    size = target.size or 0
    arguments = {
        f"{words.LAYERS} {sum(counts)}": True,
        f"{words.PIPELINE} {target.pipeline}": True,
        f"{words.TENSOR} {target.tensor}": target.tensor > 1,
        f"{words.CONTEXT} {target.context}": target.context > 1,
        f"--num-experts {plan.experts}": plan.experts,
        f"--expert-model-parallel-size {plan.ranks_per_replica} "
        "--expert-tensor-parallel-size 1": plan.experts,
        # E embedding, t a transformer layer, L loss, | between stages
        f'{words.LAYOUT} "E{layout}L"': not even,
        f"{words.LAYERS_PER_CHUNK} {counts[0]}": even and plan.chunks > 1,
        f"{words.GRANULARITY} selective": in_parts,
        f"{words.GRANULARITY} full {method}": any(units) and not in_parts,
        # Megatron refuses to divide layers with experts otherwise.
        words.SEQUENCE_PARALLEL: (plan.cluster.sequence_parallel or plan.experts)
        and target.tensor > 1,
        words.SHARDED: target.sharded,
        f"{words.MICRO_BATCH} {size}": size,
        f"{words.GLOBAL_BATCH} {size * target.microbatches * target.replicas}": size,
    }
    return "\n".join([comment(said), *(text for text, holds in arguments.items() if holds)]) + "\n"


def _check_order(stem: str, stage_of: Mapping[int, int]) -> None:
    """Refuse stages that have the elements of a list in another order than the model's, in which
    others run them.
    """
    for earlier, later in pairwise(sorted(stage_of)):
        if stage_of[earlier] > stage_of[later]:
            raise PlanError(
                f"'{stem}.{later}' is in stage {stage_of[later]}, and '{stem}.{earlier}' before "
                f"it in the model is in "
                f"stage {stage_of[earlier]}: other systems run stages in the model's order",
                hint="choose the cuts with `plan price`",
            )


def layer_counts(plan: Plan, system: str = "Megatron") -> tuple[str, list[int]]:
    """Return the name of the model's list of transformer layers ("h" of "h.0.attn", ...), and each
    stage's count.

    Raises:
        PlanError: for stages that a system which splits such lists has no form for.
    """
    numbers = [[_block(layer) for layer in stage.layers] for stage in plan.stages]
    blocks: defaultdict[str, set[int]] = defaultdict(set)
    for found in (block for stage in numbers for block in stage if block is not None):
        blocks[found[0]].add(found[1])
    if not blocks or max(map(len, blocks.values())) < 2:
        problem = (
            f"{system} splits transformers by layers, and '{plan.model}' has no numbered "
            f"list of layers"
        )
        raise PlanError(problem, hint="use `system=torchtitan`")

    stem = max(blocks, key=lambda name: len(blocks[name]))
    place: dict[int, int] = {}
    for index, stage in enumerate(numbers):
        for layer, block in zip(plan.stages[index].layers, stage, strict=True):
            if block is not None and block[0] == stem:
                if place.setdefault(block[1], index) != index:
                    problem = (
                        f"the cut before stage {index} is inside '{stem}.{block[1]}', a "
                        f"layer to {system}"
                    )
                    raise PlanError(
                        problem,
                        hint="solve with `granularity=block`; or profile with blocks(model)",
                    )
            elif index != (0 if not place else len(plan.stages) - 1):
                problem = (
                    f"layer '{layer}' is in stage {index}, but {system} has what is before "
                    f"'{stem}.0' in the "
                )
                problem += "first stage, and what is after the list in the last"
                raise PlanError(
                    problem, hint="choose the cuts with `plan price`; or profile with blocks(model)"
                )

    _check_order(stem, place)
    return stem, [list(place.values()).count(index) for index in range(len(plan.stages))]


def _block(layer: str) -> tuple[str, int] | None:
    found = _BLOCK.match(layer)
    # A module of a list that is itself a layer is none of a transformer: "features.3" of a
    # convolutional network.
    if found is None or found[1] == layer:
        return None
    return (found[2] or "", int(found[3]))


def torchtitan_config(plan: Plan) -> str:
    """Write a Python file with torchtitan's ParallelismConfig, for a function of its
    config_registry.
    """
    target = target_of(plan, "torchtitan")
    said = [
        f"{plan.model} for torchtitan: {plan.config} on {plan.workers} workers. Give it to a "
        f"function of the model's "
        "config_registry: parallelism=PARALLELISM, training=TrainingConfig(**BATCH).",
        "The names of modules are those of the planned model: torchtitan's model must have the "
        "same.",
        *target.remarks,
        *model_remarks(plan, "torchtitan"),
    ]
    stage = plan.stages[0]
    if stage.shards_optimizer_alone:
        said.append(
            "torchtitan shards weights and gradients, too (FSDP), not the optimizer's state alone."
        )

    if any(stage.recomputes for stage in plan.stages):
        said.append("Some stages recompute: set activation_checkpoint of the job.")
    size = target.size or 1
    fields: dict[str, object] = {
        "pipeline_parallel_degree": target.pipeline,
        "tensor_parallel_degree": target.tensor,
        **({} if target.context == 1 else {"context_parallel_degree": target.context}),
        **({} if plan.experts is None else {"expert_parallel_degree": plan.ranks_per_replica}),
        "data_parallel_replicate_degree": stage.copies if target.sharded else target.replicas,
        "data_parallel_shard_degree": target.replicas // stage.copies if target.sharded else 1,
    }
    if stage.shards_gradients:
        fields["fsdp_reshard_after_forward"] = "always" if stage.shards_weights else "never"
    if target.pipeline > 1:
        parts, divided = _modules(plan)
        if divided:
            said.append(
                f"{' and '.join(divided)} must be a ModuleList or ModuleDict: torchtitan shards "
                f"no other."
            )
        schedule = plan.schedule.torch_name.removeprefix("Schedule")
        if plan.schedule.torch_differs and not plan.schedule.asynchronous:
            said.append(
                f"torchtitan has no {plan.schedule}. {schedule} is the nearest: its bubble and the "
                f"memory of its activations are not those that the plan predicts."
            )
        fields |= {
            "pipeline_parallel_schedule": schedule,
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
    """Return the modules of each stage, and the lists of modules that the cuts split.

    torchtitan's splitter knows the direct children of the model, and of a ModuleList or ModuleDict
    among them its elements. A plan does not say which are such lists: a child with numbered parts
    in one stage is named both ways.
    """
    found: dict[str, int] = {}
    children: defaultdict[str, set[int]] = defaultdict(set)
    numbered: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            child, _, rest = layer.partition(".")
            number = rest.partition(".")[0]
            name = f"{child}.{number}" if number.isdigit() else child
            if name == "loss":
                continue
            if found.setdefault(name, index) != index:
                problem = (
                    f"torchtitan can only cut between the direct children of a model, or between "
                    f"the elements of a list among them; the cut before stage {index} is inside "
                    f"'{name}'"
                )
                hint = "solve with `granularity=block`; or profile with blocks(model)"
                if any(part.isdigit() for part in rest.split(".")[:2]):  # as in 'model.layers.0'
                    hint = (
                        "export with `system=megatron`; or plan a model file that builds "
                        "torchtitan's own model, whose blocks are a list among its children"
                    )
                raise PlanError(problem, hint=hint)
            children[child].add(index)
            if number.isdigit():
                numbered[child][int(number)] = index

    for child, places in numbered.items():
        _check_order(child, places)
    divided = [child for child, stages in children.items() if len(stages) > 1]
    parts = []
    for place in range(len(plan.stages)):
        own = [name for name, index in found.items() if index == place]
        whole = (name.partition(".")[0] for name in own if "." in name)
        parts.append([*own, *dict.fromkeys(child for child in whole if child not in divided)])

    return parts, divided
