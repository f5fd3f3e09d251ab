"""`plan train`: run a plan on this host, or as one worker under torchrun."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from planner.cli.arguments import Verbs, add_options, add_plan_argument, declare, read_options
from planner.cli.output import print_answer, print_complaint, print_progress
from planner.options.training import CheckpointOptions, RunOptions, TrainArguments, TrainingOptions

if TYPE_CHECKING:
    from planner.workers.job import Job, TrainResult

DESCRIPTION = """\
Train the model as the plan says: one process per worker on this host, started through torchrun's own launcher.

On several hosts, start the same command on each with torchrun, and it runs as one of the plan's workers:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 \\
        -m planner train model.py --plan plan.json

with --node-rank 1 on the second. (With --rdzv-backend c10d, torchrun assigns the ranks itself. But if the link to HOST0
is cut, the workers end while torchrun on the host that is cut off waits for its store for ever.) Under Slurm, the tasks
of `srun plan train ...` are the workers.

Data comes from dataset() in the model file; without one, from random batches shaped like example_batch().
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "train", "train the model as the plan says", DESCRIPTION, run)
    parser.add_argument("model", help="model file, or model.py:builder for another function than build_model")
    add_plan_argument(parser)
    add_options(parser.add_mutually_exclusive_group(), TrainArguments, "steps", "epochs")
    add_options(parser, TrainArguments, "seed", "device", "backend", "save_weights", "defer_weights", "baseline")
    add_options(parser.add_argument_group("how to train"), TrainingOptions)
    add_options(parser.add_argument_group("checkpoints"), CheckpointOptions)
    add_options(parser.add_argument_group("watching the run"), RunOptions)


def run(args: argparse.Namespace) -> int:
    """Train, then print what was predicted beside what was measured."""
    from planner.api import make_job, run_job
    from planner.executor.checkpoint.folders import after_torchrun_restart
    from planner.formats.plan import load_plan
    from planner.options.training import RunOptions, TrainingOptions
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
    job = make_job(args.model, load_plan(args.plan), arguments)
    if as_worker:
        _run_as_worker(job.model_copy(update={"started_again": continued is not None}), args.json)
    _print_result(run_job(job, print_progress), args.json)
    return 0


def _run_as_worker(job: Job, as_json: bool) -> NoReturn:
    from planner.api import trace_writer
    from planner.executor.checkpoint.folders import torchrun_run_id
    from planner.executor.worker import run_worker
    from planner.workers.ending import end_process

    job = job.model_copy(update={"run": torchrun_run_id()})
    code, result = run_worker(
        job, trace_writer(job), tell=lambda error: print_complaint("error", error.message, error.hint)
    )
    if result is not None:
        _print_result(result, as_json)
    end_process(code)


def _print_result(result: TrainResult, as_json: bool) -> None:
    from planner.report.tables.runs import training_report

    print_answer(result, as_json, training_report)
