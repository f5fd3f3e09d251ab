"""`plan train`: run a plan on this host, or as one worker under torchrun."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from planner.cli.arguments.devices import add_backend_argument, add_device_argument
from planner.cli.arguments.numbers import at_least
from planner.cli.arguments.training import (
    add_checkpoint_arguments,
    add_run_arguments,
    add_training_arguments,
    checkpoints_of,
)
from planner.cli.arguments.verb import Verbs, add_plan_argument, declare
from planner.cli.output import print_answer, print_progress
from planner.workers.defaults import STEPS

if TYPE_CHECKING:
    from planner.workers.job import Job, TrainResult

_ASKED = ("steps", "epochs", "seed", "device", "backend", "baseline", "save_weights", "defer_weights")
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
    parser = declare(verbs, "train", "train the model as the plan says", DESCRIPTION)
    parser.add_argument("model", help="model file, or model.py:builder for another function than build_model")
    add_plan_argument(parser)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=at_least(1), metavar="N", help="train N minibatches")
    length.add_argument(
        "--epochs",
        type=at_least(1),
        metavar="N",
        help=f"train N passes over dataset() (default: 1, or {STEPS} minibatches without dataset())",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of weights, data order and dropout (default: 0, or that of the checkpoint)"
    )
    add_device_argument(parser, "the kind that the plan was made for")
    add_backend_argument(parser)
    parser.add_argument(
        "--save-weights",
        metavar="FILE",
        help="write the trained weights under their names in the model: a .safetensors file, tensor by tensor, or one "
        "for torch.load, for which worker 0 holds the whole model",
    )
    parser.add_argument(
        "--defer-weights",
        action=argparse.BooleanOptionalAction,
        help="let each worker make only its own stages' weights, or all; the weights are the same (default: only its "
        "own where the host has no room for a whole model per worker)",
    )
    parser.add_argument(
        "--baseline",
        choices=["data-parallel"],
        help="train the unsplit model with DistributedDataParallel on as many workers, to compare with the plan; if "
        "the plan divides minibatches, workers share the microbatches and all-reduce the sum of their gradients once",
    )
    add_training_arguments(parser)
    add_checkpoint_arguments(parser)
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, then print what was predicted beside what was measured."""
    from planner.api import make_job, run_job
    from planner.executor.checkpoint.folders import after_torchrun_restart
    from planner.formats.plan import load_plan
    from planner.workers.job import RunOptions, TrainingOptions
    from planner.workers.meeting import started_as_worker

    checkpoints = checkpoints_of(args)
    as_worker = started_as_worker()
    continued = after_torchrun_restart(checkpoints) if as_worker else None
    job = make_job(
        args.model,
        load_plan(args.plan),
        options=TrainingOptions(**{name: getattr(args, name) for name in TrainingOptions.model_fields}),
        run_options=RunOptions(**{name: getattr(args, name) for name in RunOptions.model_fields}),
        checkpoints=continued or checkpoints,
        show_progress=sys.stderr.isatty(),
        **{name: getattr(args, name) for name in _ASKED},
    )
    if as_worker:
        _run_as_worker(job.model_copy(update={"started_again": continued is not None}), args.json)
    _print_result(run_job(job, print_progress), args.json)
    return 0


def _run_as_worker(job: Job, as_json: bool) -> NoReturn:
    from planner.cli.worker.run import die_with_parent, end_process, run_worker
    from planner.executor.checkpoint.folders import torchrun_run_id
    from planner.profiler.this_machine import keep_freed_pages

    die_with_parent()
    keep_freed_pages()
    job = job.model_copy(update={"run": torchrun_run_id()})
    code, result = run_worker(job)
    if result is not None:
        _print_result(result, as_json)
    end_process(code)


def _print_result(result: TrainResult, as_json: bool) -> None:
    from planner.report.tables.training import training_report

    print_answer(result, as_json, training_report)
