"""`plan train`: run a plan, here or as one worker under torchrun; `plan export`, `plan export-weights`: for others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import planner
from planner.cli.arguments import Verbs, add_output_argument, add_plan_argument, declare
from planner.cli.output import STDOUT, print_answer, print_complaint, print_progress, print_written
from planner.cli.records import add_options, read_options
from planner.options.training import CheckpointOptions, RunOptions, TrainArguments, TrainingOptions

if TYPE_CHECKING:
    from planner.workers.job import Job

TRAIN = """\
Train the model as the plan says: one process per worker on this host.

On several hosts, start the same command on each with torchrun, and it runs as one of the plan's workers:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 \\
        -m planner train model.py --plan plan.json

with --node-rank 1 on the second. (With --rdzv-backend c10d, torchrun assigns the ranks itself. But if the link to HOST0
is cut, the workers end while torchrun on the host that is cut off waits for its store for ever.) Under Slurm, the tasks
of `srun plan train ...` are the workers.

Data comes from dataset() in the model file; without one, from random batches shaped like example_batch().
"""
WEIGHTS = """\
Write the weights in a checkpoint to one safetensors file, under their names in the unsplit model, which loads them:

    plan export-weights checkpoints -o model.safetensors

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""
EXPORT = """\
Write the plan's stage boundaries in the form that another pipeline system takes.

    plan export model.py --to torch-pipelining     a script for torchrun -> train_pipelining.py
    plan export --to deepspeed                     a PipelineModule      -> pipeline_partition.py
    plan export --to megatron                      arguments, printed
    plan export --to torchtitan                    its configuration, printed

None of these systems supports stages with different numbers of replicas: exporting such a plan is an error. None
stashes weights either: comments in the file say how the system's training differs from the plan's.
"""
FILES = {
    "torch-pipelining": "train_pipelining.py",
    "deepspeed": "pipeline_partition.py",
    "megatron": "-",
    "torchtitan": "-",
}


def add_train(verbs: Verbs) -> None:
    """Declare the arguments of `plan train`."""
    parser = declare(verbs, "train", "train the model as the plan says", TRAIN, train)
    parser.add_argument("model", help="model file, or model.py:builder for another function than build_model")
    add_plan_argument(parser)
    add_options(parser.add_mutually_exclusive_group(), TrainArguments, "steps", "epochs")
    add_options(parser, TrainArguments, "seed", "device", "backend", "save_weights", "defer_weights", "baseline")
    add_options(parser.add_argument_group("how to train"), TrainingOptions)
    add_options(parser.add_argument_group("checkpoints"), CheckpointOptions)
    add_options(parser.add_argument_group("watching the run"), RunOptions)


def add_exports(verbs: Verbs) -> None:
    """Declare the arguments of `plan export-weights` and `plan export`."""
    summary = "write a checkpoint's weights to one safetensors file"
    weights = declare(verbs, "export-weights", summary, WEIGHTS, export_weights)
    weights.add_argument("checkpoint", help="a checkpoint of `plan train`, or a folder whose newest one is meant")
    add_output_argument(weights, Path("model.safetensors"))
    summary = "write the plan for PyTorch's pipelining, DeepSpeed, Megatron or torchtitan"
    parser = declare(verbs, "export", summary, EXPORT, export)
    parser.add_argument("model", nargs="?", help="model file, for torch-pipelining")
    parser.add_argument("--to", choices=list(FILES), required=True, help="the other system")
    add_plan_argument(parser)
    told = "train_pipelining.py, pipeline_partition.py; stdout for the others"
    add_output_argument(parser, told=told, help="file to write, - for stdout")


def train(args: argparse.Namespace) -> int:
    """Train, then print what was predicted beside what was measured."""
    from planner.api.running import make_job, run_job
    from planner.executor.checkpoint.folders import after_torchrun_restart, complete
    from planner.workers.meeting import started_as_worker

    checkpoints = read_options(CheckpointOptions, args)
    as_worker = started_as_worker()
    continued = after_torchrun_restart(checkpoints) if as_worker else None
    arguments = read_options(
        TrainArguments,
        args,
        options=read_options(TrainingOptions, args),
        checkpoints=continued or checkpoints,
        run_options=read_options(RunOptions, args),
        show_progress=sys.stderr.isatty(),
    )
    job = make_job(args.model, planner.load_plan(args.plan), arguments)
    if as_worker:
        _run_as_worker(job.model_copy(update={"started_again": continued is not None}), args.json)
    try:
        result = run_job(job, print_progress)
    except KeyboardInterrupt:
        if checkpoints.every is None:
            print_progress("nothing was saved: with `every=N` a run writes checkpoints, and `resume` continues it")
        elif complete(Path(checkpoints.folder)):
            print_progress(f"the same command with `resume` continues from the newest in '{checkpoints.folder}'")
        raise
    print_answer(result, args.json)
    return 0


def _run_as_worker(job: Job, as_json: bool) -> NoReturn:
    from planner.api.running import trace_writer
    from planner.executor.checkpoint.folders import torchrun_run_id
    from planner.executor.worker import run_worker
    from planner.workers.ending import end_process

    def tell(error: planner.PlannerError) -> None:
        print_complaint("error", error.message, error.hint)

    job = job.model_copy(update={"run": torchrun_run_id()})
    code, result = run_worker(job, trace_writer(job), tell=tell)
    if result is not None:
        print_answer(result, as_json)
    end_process(code)


def export(args: argparse.Namespace) -> int:
    """Write or print."""
    from planner.formats.files import write_text

    plan = planner.load_plan(args.plan)
    text = planner.export(plan, args.to, model=args.model)
    if args.to != "torch-pipelining" and plan.loss is not None and plan.loss.weighs:  # as that script does
        print_complaint(
            "warning",
            f"{args.to} does not weigh microbatches by their labels as `plan train` does, so it trains another loss",
            "weigh them in the loss function: a comment in the text says how they count",
        )
    output = args.output or Path(FILES[args.to])
    if output == STDOUT:
        print(json.dumps({"text": text}) if args.json else text.rstrip("\n"))
    else:
        write_text(output, text)
        print_written(output, as_json=args.json)
    return 0


def export_weights(args: argparse.Namespace) -> int:
    """Write the file, and print what is in it."""
    from planner.units import format_bytes

    done = planner.export_weights(args.checkpoint, args.output)
    if args.json:
        content = {"checkpoint": str(done.checkpoint), "path": str(done.path), "tensors": done.tensors}
        print(json.dumps(content | {"size_bytes": done.size_bytes, "minibatch": done.minibatch}, indent=1))
        return 0
    print(
        f"{done.path}: {done.tensors} parameters and buffers, {format_bytes(done.size_bytes)}, "
        f"after {done.minibatch} minibatches ({done.checkpoint})"
    )
    return 0
