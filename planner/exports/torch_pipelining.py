"""Export a plan as a script for torch.distributed.pipelining, to be started with torchrun."""

import json

from planner.errors import InputError, PlanError
from planner.exports.limits import comment, shared_weights, stage_layers, target_of, template
from planner.formats.plan import Plan

SYSTEM = "torch.distributed.pipelining"


def torch_pipelining_file(plan: Plan, model: str | None, name: str = "train_pipelining.py") -> str:
    """Write a script that builds the stages as `plan train` does and runs them with PyTorch's schedule."""
    target = target_of(plan, SYSTEM)
    if target.tensor > 1:
        problem = f"a script for {SYSTEM} has whole layers on every worker, and those of '{plan.config}' are divided"
        raise PlanError(problem, hint="export with `system=torchtitan`, or solve with `tensor=1`")
    if not plan.trainable or plan.microbatch_size is None:
        problem = f"the plan for '{plan.model}' comes from an imported profile, which holds no model to train"
        raise PlanError(problem, hint="profile your model file with: plan profile model.py")
    if model is None:
        raise InputError(f"a script for {SYSTEM} needs the model file", hint="give the one that was planned for")
    stages, said = len(plan.stages), target.remarks
    schedule = plan.schedule.torch_name
    if schedule == "Schedule1F1B" and target.microbatches < stages:
        schedule = "ScheduleGPipe"
        said.append(
            f"Schedule1F1B needs at least as many microbatches as stages, and {stages} stages have "
            f"{target.microbatches}: ScheduleGPipe takes the same time with so few."
        )
    if target.sharded:
        said.append("The plan divides the optimizer's state over replicas; this script keeps it on each of them.")
    return template("torch_pipelining").substitute(
        model=plan.model,
        name=name,
        stages=stages,
        workers=plan.workers,
        remarks=f"\n{comment(said)}\n" if said else "",
        schedule=schedule,
        schedule_stages="stages" if plan.schedule.chunked else "stages[0]",
        model_path=json.dumps(model),
        graph_hash=json.dumps(plan.graph_hash),
        autocast=repr(plan.autocast),
        channels_last=plan.memory_format == "channels-last",
        compiled=plan.compiled,
        microbatch_size=plan.microbatch_size,
        microbatches=target.microbatches,
        replicas=target.replicas,
        layers=stage_layers(plan),
        recompute=[stage.recompute_groups for stage in plan.stages],
        pipeline_workers=target.pipeline,
        worker_of=[plan.schedule.worker_of(stage, target.pipeline) for stage in range(stages)],
        loss=repr(plan.loss),
        shared=shared_weights(plan),
        threads=plan.device.threads or 1,
    )
