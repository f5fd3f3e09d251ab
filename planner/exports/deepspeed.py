"""Export a plan as a PipelineModule for DeepSpeed whose stages begin where the plan's do."""

from planner.errors import PlanError
from planner.exports.limits import comment, model_remarks, stage_layers, target_of, template
from planner.formats.plan import Plan


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
    return template("deepspeed").substitute(
        model=plan.model,
        stages=len(plan.stages),
        workers=plan.workers,
        replicas=target.replicas,
        of_ranks=of_ranks,
        import_topology=imported,
        topology=topology,
        remarks=f"\n{comment(said)}\n" if said else "",
        layers=stage_layers(plan),
        microbatch_size=target.size or "None  # unknown to the plan",
        microbatches=target.microbatches,
        zero='\n    "zero_optimization": {"stage": 1},' if target.sharded else "",
    )
