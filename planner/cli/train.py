"""`plan train`: run a plan on this host, or as one worker under torchrun."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner.cli.output import print_answer, print_progress

if TYPE_CHECKING:
    from planner.executor.job import Job, TrainResult

DESCRIPTION = """\
Train the model as the plan says: one process per worker on this host, started through torchrun's own launcher.

On several hosts, start the same command on each with torchrun, and it runs as one of the plan's workers:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 \\
        -m planner train model.py --plan plan.json

and with --node-rank 1 on the second. (With --rdzv-backend c10d torchrun gives out the ranks itself; but if the link to
HOST0 is cut, the workers end, and a torchrun that is cut off waits for its store without a limit.)

Data comes from the model file's dataset(); without one, random batches shaped like example_batch() are drawn.
"""


def positive(text: str) -> float:
    """An argument above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    """An argument of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "train",
        help="train the model as the plan says",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="model file, or model.py:builder for another function than build_model")
    parser.add_argument("--plan", type=Path, default=Path("plan.json"), help="the plan to run (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="train N minibatches")
    length.add_argument(
        "--epochs", type=int, metavar="N", help="train N passes over dataset() (default: 1, or 100 steps without it)"
    )
    parser.add_argument(
        "--seed", type=int, help="of weights, data order and dropout (default: 0, or that of the checkpoint)"
    )
    parser.add_argument(
        "--save-weights", metavar="FILE", help="write the trained weights, by original name, for torch.load"
    )
    parser.add_argument(
        "--defer-weights",
        action="store_true",
        help="each worker makes the weights of its own stage alone, for models of which the whole fits nowhere; the "
        "initial weights differ from those without, and are the same for any plan",
    )
    _add_options(parser)
    _add_checkpoint_options(parser)
    parser.add_argument(
        "--baseline",
        choices=["data-parallel"],
        help="train the unsplit model with DistributedDataParallel on as many workers, to compare with the plan; "
        "where it divides minibatches, workers share each, add up their microbatches' gradients and reduce them once",
    )
    _add_run_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """What becomes a `TrainingOptions`: the names are the same."""
    group = parser.add_argument_group("how to train")
    group.add_argument(
        "--drop-last", action="store_true", help="leave out the last, smaller minibatch of an epoch of dataset()"
    )

    group.add_argument(
        "--evaluate-every",
        type=count,
        metavar="N",
        help="evaluate on evaluation_dataset() after every N minibatches, and at the end; training goes on as without",
    )
    group.add_argument("--tensorboard", metavar="DIR", help="write losses, rates and evaluations there for TensorBoard")
    group.add_argument(
        "--scale-lr",
        action="store_true",
        help="multiply each stage's learning rate by the number of minibatches that one of its updates averages: its "
        "replicas under 1f1b, times --accumulate",
    )
    group.add_argument(
        "--clip-grad-norm",
        type=positive,
        metavar="X",
        help="scale gradients down to norm X where it is larger: the norm of all gradients of the model, or of a "
        "stage's own under 1f1b and 2bw",
    )
    group.add_argument(
        "--accumulate",
        type=count,
        default=1,
        metavar="K",
        help="under 1f1b, update after K minibatches per replica, with their mean gradient (default: %(default)s); "
        "plan simulate --accumulate K says beforehand how fast that is",
    )
    group.add_argument(
        "--deferred-batch-norm",
        action="store_true",
        help="update the running statistics of BatchNorm once per minibatch, by those of all its microbatches on all "
        "replicas together, as if it were not divided; microbatches are normalised by their own as ever",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """What becomes a `RunOptions`: the names are the same."""
    group = parser.add_argument_group("looking after the run")
    group.add_argument(
        "--hang-timeout",
        dest="hang_timeout_s",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="end the run, and name the cause, when a worker has not moved for so much longer than the slowest "
        "instruction took (default: %(default)g)",
    )
    group.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface whose address all ports listen on, eth0 for instance (default: on one host the "
        "loopback, under torchrun what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write what every worker did as a Chrome trace, which Perfetto opens, in the form of plan simulate's",
    )
    group.add_argument(
        "--trace-minibatches",
        type=_window,
        default=100,
        metavar="N|A:B",
        help="which minibatches to trace: the last N, or those from A on and before B (default: %(default)s)",
    )
    group.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="when a worker fails, start all again from the last complete checkpoint, at most N times (default: "
        "%(default)s); on several hosts it is torchrun's --max-restarts that does so",
    )
    group.add_argument(
        "--stop-on-nan",
        action="store_true",
        help="end the run when the loss of a minibatch is NaN or infinite (default: say so in the result)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; give seconds above 0")
    return value


def _add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """What becomes a `CheckpointOptions`."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="N",
        help="after every N minibatches, and at the end, let the pipeline run empty and write weights, optimizer "
        "state and the place in the data",
    )
    group.add_argument(
        "--checkpoint-folder",
        default="checkpoints",
        metavar="DIR",
        help="where to; on a file system that all hosts share (default: %(default)s)",
    )
    group.add_argument(
        "--keep",
        type=count,
        default=3,
        metavar="K",
        help="remove all but the last K checkpoints (default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="go on from the checkpoint PATH, or the newest one in it, which any plan of the model may have written; "
        "without PATH, or with 'auto', from the newest in --checkpoint-folder, if there is one yet. --steps and "
        "--epochs count from the beginning of the first run",
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def _window(text: str) -> int | tuple[int, int]:
    first, colon, end = text.partition(":")
    if not colon and int(first) > 0:
        return int(first)
    if colon and 0 <= int(first) < int(end):
        return int(first), int(end)
    raise argparse.ArgumentTypeError(f"{text} names no minibatches; give 100 for the last 100, or 20:40")


def run(args: argparse.Namespace) -> int:
    """Train, then print predicted against measured."""
    from planner.api import make_job, run_job
    from planner.executor.checkpoint.resume import after_torchrun_restart
    from planner.executor.job import CheckpointOptions, RunOptions, TrainingOptions
    from planner.formats.plan import load_plan

    checkpoints = CheckpointOptions(
        every=args.checkpoint_every, folder=args.checkpoint_folder, keep=args.keep, resume=args.resume
    )
    # torchrun sets these for each process it starts.
    by_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    continued = after_torchrun_restart(checkpoints) if by_torchrun else None
    job = make_job(
        args.model,
        load_plan(args.plan),
        steps=args.steps,
        epochs=args.epochs,
        seed=args.seed,
        options=TrainingOptions(**{name: getattr(args, name) for name in TrainingOptions.model_fields}),
        run_options=RunOptions(**{name: getattr(args, name) for name in RunOptions.model_fields}),
        checkpoints=continued or checkpoints,
        baseline=args.baseline,
        save_weights=args.save_weights,
        defer_weights=args.defer_weights,
        show_progress=sys.stderr.isatty(),
    )
    if by_torchrun:
        _run_as_worker(job.model_copy(update={"started_again": continued is not None}), args.json)
    print_result(run_job(job, print_progress), args.json)
    return 0


def _run_as_worker(job: Job, as_json: bool) -> NoReturn:
    from planner.cli.worker import die_with_parent, end_process, run_worker
    from planner.executor.checkpoint.resume import torchrun_run_id
    from planner.profiler.measured.malloc import keep_freed_pages

    die_with_parent()
    keep_freed_pages()
    job = job.model_copy(update={"run": torchrun_run_id()})
    code, result = run_worker(job)
    if result is not None:
        print_result(result, as_json)
    end_process(code)


def print_result(result: TrainResult, as_json: bool) -> None:
    """The final table on stdout."""
    from planner.report.tables.training import training_report

    print_answer(result, as_json, training_report)
