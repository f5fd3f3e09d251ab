"""Export a plan as a script for torch.distributed.pipelining, to be started with torchrun."""

from __future__ import annotations

import json
from string import Template

from planner.errors import InputError, PlanError
from planner.exports.limits import comment, shared_weights, stage_layers, target_of
from planner.formats.plan import Plan

SYSTEM = "torch.distributed.pipelining"

_SCRIPT = Template('''\
"""Trains $model as a pipeline of $stages stages with torch.distributed.pipelining; written by `plan export`.

    torchrun --nproc-per-node $workers $name

Needs planner beside PyTorch: it captures the model file, cuts it as `plan train` does and reads its data. PyTorch's
schedule runs the stages. On several hosts, start it on each with torchrun's --nnodes and --rdzv-endpoint.
"""
$remarks
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import $schedule

from planner.executor.checkpoint.pretrained import fill_pretrained
from planner.executor.communication.shared_gradients import separate_copies
from planner.executor.run.data import make_batches, weighted
from planner.formats.profile import LossMean
from planner.model.capture.capture import capture_file
from planner.model.options import ModuleOptions, autocast_dtype
from planner.model.spec import load_model_file
from planner.model.stage.stage import ChainedStage
from planner.schedule.instructions import Unit

MODEL = $model_path
GRAPH_HASH = $graph_hash  # of the model that was planned for
AUTOCAST = $autocast
CHANNELS_LAST = $channels_last
COMPILED = $compiled
MICROBATCH_SIZE = $microbatch_size
PIPELINES = $replicas  # copies of every stage
MICROBATCHES = $microbatches  # between two updates, of each pipeline
STAGES = $layers  # the layers of each
RECOMPUTE = $recompute  # of each, groups of layers that keep only what enters them for the backward
WORKERS = $pipeline_workers  # of one pipeline
WORKER_OF = $worker_of  # for each stage
LOSS = $loss  # what it is a mean over, by which microbatches count
SHARED = $shared  # weights by the stages that hold a copy; all copies are updated with the sum of their gradients


def weighted_loss(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # The mean over no label at all is no number.
    return torch.where(weight > 0, loss * weight, 0.0).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads($threads)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    worker, pipeline = divmod(dist.get_rank(), PIPELINES)
    # new_group is collective: every process must make every group, in the same order.
    pipelines = [dist.new_group([w * PIPELINES + p for w in range(WORKERS)]) for p in range(PIPELINES)]
    copies = [dist.new_group([w * PIPELINES + p for p in range(PIPELINES)]) for w in range(WORKERS)]
    holders = {
        (held_by, p): dist.new_group(sorted({WORKER_OF[stage] * PIPELINES + p for stage in held_by}))
        for held_by in SHARED
        for p in range(PIPELINES)
    }

    spec = load_model_file(MODEL)
    torch.manual_seed(arguments.seed)
    model = spec.build_model()
    fill_pretrained(spec, model, arguments.seed)
    example = spec.example_batch(MICROBATCH_SIZE)
    options = ModuleOptions(autocast_dtype(AUTOCAST), CHANNELS_LAST, COMPILED, device.type)
    graph = capture_file(spec, example, model, options=options)
    if graph.hash != GRAPH_HASH:
        raise SystemExit(f"the plan was made for another model than {MODEL}")
    modules, stages, size, group = {}, [], MICROBATCH_SIZE, pipelines[pipeline]
    for index in [index for index, own in enumerate(WORKER_OF) if own == worker]:
        module = ChainedStage(graph, STAGES[index], size, seed=arguments.seed, recompute=RECOMPUTE[index])
        modules[index] = module.to(device)
        ends = {"input_args": module.input_args, "output_args": module.output_args}
        stages.append(PipelineStage(module, index, len(STAGES), device, group=group, **ends))
    # The loss is the last layer of the last stage; $schedule averages its gradients over microbatches.
    schedule = $schedule($schedule_stages, MICROBATCHES, loss_fn=weighted_loss)
    separate_copies(list(modules.values()))  # the schedule divides the gradients of each stage
    parameters = {
        name: p for module in modules.values() for name, p in module.stage.named_parameters() if p.requires_grad
    }
    named = {index: dict(m.stage.named_parameters(remove_duplicate=False)) for index, m in modules.items()}
    shared = [
        ([named[index][name] for index in sorted(modules.keys() & held_by)], holders[held_by, pipeline])
        for held_by, names in SHARED.items()
        if modules.keys() & held_by
        for name in names
    ]
    optimizer = spec.optimizer(parameters) if parameters else None
    scheduler = None if optimizer is None else spec.scheduler(optimizer)
    # The stages take microbatches of one size, so the last, smaller ones of an epoch are left out.
    made = make_batches(spec, MICROBATCH_SIZE, MICROBATCHES * PIPELINES, arguments.seed, drop_last=True)
    data = weighted(made, LOSS, spec)

    for minibatch in range(arguments.steps):
        numbers = range(pipeline, MICROBATCHES * PIPELINES, PIPELINES)
        batches = {number: data.batch(Unit(minibatch, number)).to(device) for number in numbers}
        for module in modules.values():
            module.begin(minibatch, batches)
        losses = []
        # The real target is in the batches. A microbatch weighs 1 where all count alike.
        weights = [data.share(Unit(minibatch, number)) * MICROBATCHES * PIPELINES for number in numbers]
        schedule.step(target=torch.tensor(weights, device=device), losses=losses)
        for same, group in shared:
            total = sum((p.grad for p in same if p.grad is not None), start=torch.zeros_like(same[0]))
            dist.all_reduce(total, group=group)
            for parameter in same:
                parameter.grad = total.clone()
        for parameter in parameters.values() if PIPELINES > 1 else []:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=copies[worker])
            parameter.grad /= PIPELINES
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if losses:
            mean = torch.stack(losses).detach().mean()
            dist.all_reduce(mean, group=copies[worker])
            if pipeline == 0:
                print(f"minibatch {minibatch} loss {float(mean) / PIPELINES:.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
''')


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
    return _SCRIPT.substitute(
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
