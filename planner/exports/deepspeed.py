"""Export a plan as a PipelineModule for DeepSpeed whose stages begin where the plan's do."""

from __future__ import annotations

from string import Template

from planner.errors import PlanError
from planner.exports.limits import comment, model_remarks, stage_layers, target_of
from planner.formats.plan import Plan

_FILE = Template('''\
"""Stage boundaries of $model for DeepSpeed's PipelineModule, $stages stages; written by `plan export`.

    from pipeline_partition import CONFIG, PlannedPipelineModule
    names, layers = zip(*model.named_children())  # your layers in their order, named by their path in the model
    module = PlannedPipelineModule(layers=list(layers), names=names, loss_fn=loss)
    engine, *_ = deepspeed.initialize(model=module, config=CONFIG | {"optimizer": ...})

Start it with $workers workers: $stages stages, $replicas of each$of_ranks.
"""
$remarks
from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import PipelineModule$import_topology

STAGES = $layers
STAGE_STARTS = [stage[0] for stage in STAGES]
CONFIG = {
    "train_micro_batch_size_per_gpu": $microbatch_size,
    "gradient_accumulation_steps": $microbatches,$zero
}


def partition(names: Sequence[str]) -> list[int]:
    """Where each stage begins among layers called `names`, and their number: what DeepSpeed calls parts.

    A name may be that of a planned layer ("features.3"), or of a module around some ("h.3" around "h.3.mlp").
    """
    parts = [0]
    for start in STAGE_STARTS[1:]:
        around = [index for index, name in enumerate(names) if start == name or start.startswith(f"{name}.")]
        if not around:
            raise ValueError(f"a stage begins at '{start}', which is none of the layers {list(names)}")
        name = names[around[0]]
        layers = [layer for stage in STAGES for layer in stage]
        if start != name and any(layer.startswith(f"{name}.") for layer in layers[: layers.index(start)]):
            raise ValueError(f"a stage begins at '{start}', inside the layer '{name}': give its parts one by one")
        parts.append(around[0])
    return [*parts, len(names)]


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule of `names`d layers, divided as planned."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str], **options: Any) -> None:
        self._planned = partition(names)
        super().__init__(layers=list(layers), $topology, **options)

    def _partition_layers(self, method: str = "planned") -> None:
        # PipelineModule has methods of its own for this and takes no list, so it is overridden.
        self.parts = self._planned
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
''')


def deepspeed_file(plan: Plan) -> str:
    """Write a Python file with a PipelineModule of the plan's stages."""
    target = target_of(plan, "DeepSpeed")
    if plan.schedule.chunked:
        problem = f"DeepSpeed has no schedule like {plan.schedule}: each of its workers has one stage"
        raise PlanError(problem, hint=f"solve with `schedule={plan.schedule.unchunked}`")
    said = [*target.remarks, *model_remarks(plan, "DeepSpeed")]
    if not plan.schedule.alternates:
        said.append(f"DeepSpeed runs 1F1B with a flush, where the plan is for {plan.schedule}.")
    if any(stage.recompute for stage in plan.stages):
        said.append("Some stages recompute: set PipelineModule's activation_checkpoint_interval.")
    topology, imported, of_ranks = "num_stages=len(STAGE_STARTS)", "", ""
    if target.tensor > 1:
        said.append("Give it layers that divide themselves over the axis 'model' of its topology, such as Megatron's.")
        topology = f"topology=PipeModelDataParallelTopology({len(plan.stages)}, {target.tensor}, {target.replicas})"
        imported = "\nfrom deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology"
        of_ranks = f" on {target.tensor} ranks"
    return _FILE.substitute(
        model=plan.model,
        stages=len(plan.stages),
        workers=plan.workers,
        replicas=target.replicas,
        of_ranks=of_ranks,
        import_topology=imported,
        topology=topology,
        remarks=f"\n{comment(said)}\n" if said else "",
        layers=stage_layers(plan),
        microbatch_size=plan.microbatch_size or "None  # unknown to the plan",
        microbatches=target.microbatches,
        zero='\n    "zero_optimization": {"stage": 1},' if target.sharded else "",
    )
