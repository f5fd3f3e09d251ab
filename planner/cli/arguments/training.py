"""The arguments of `plan train`: how to train, which checkpoints to write, how to watch the run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.arguments.numbers import at_least, positive, window
from planner.workers.defaults import CHECKPOINT_FOLDER, CHECKPOINTS_KEPT, HANG_TIMEOUT_S, TRACE_MINIBATCHES

if TYPE_CHECKING:
    from planner.workers.job import CheckpointOptions


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the fields of `TrainingOptions`, under the same names."""
    group = parser.add_argument_group("how to train")
    group.add_argument("--drop-last", action="store_true", help="skip the last minibatch of an epoch if it is smaller")
    group.add_argument(
        "--evaluate-every",
        type=at_least(1),
        metavar="N",
        help="evaluate on evaluation_dataset() after every N minibatches and at the end; this does not change training",
    )
    group.add_argument(
        "--tensorboard", metavar="DIR", help="write losses, rates and evaluations to DIR, for TensorBoard"
    )
    group.add_argument(
        "--scale-lr",
        action="store_true",
        help="multiply each stage's learning rate by the number of minibatches that one of its updates averages: its "
        "replicas under 1f1b, times --accumulate",
    )
    group.add_argument(
        "--late-lr",
        type=positive,
        default=0.0,
        metavar="K",
        help="divide each stage's learning rate by 1 + K for every update that its gradients are late (default: equal "
        "rates; 0.3 has helped short trainings of eight stages)",
    )
    group.add_argument(
        "--clip-grad-norm",
        type=positive,
        metavar="X",
        help="scale gradients down to norm X where it is larger: the norm over the whole model, or under 1f1b and 2bw "
        "that of each stage",
    )
    group.add_argument(
        "--accumulate",
        type=at_least(1),
        default=1,
        metavar="K",
        help="under 1f1b, update after K minibatches per replica, with their mean gradient (default: %(default)s); "
        "`plan simulate --accumulate K` predicts the speed",
    )
    group.add_argument(
        "--synchronous-start",
        type=positive,
        default=0.0,
        metavar="X",
        help="under 1f1b and 2bw, train the first minibatches without late gradients, draining the pipeline after each "
        "one: a share of them, as 0.2, or a number (default: none)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="use only algorithms that give the same bits in every run, even if the profile was measured "
        "without; an operation that has none ends the run",
    )
    group.add_argument(
        "--deferred-batch-norm",
        action="store_true",
        help="update the running statistics of BatchNorm once per minibatch, from all its microbatches on all "
        "replicas, as if it were not divided; each microbatch is still normalised by its own statistics",
    )


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `checkpoints_of` reads."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint-every",
        type=at_least(1),
        metavar="N",
        help="after every N minibatches and at the end, drain the pipeline and write weights, optimizer state and the "
        "position in the data",
    )
    group.add_argument(
        "--checkpoint-folder",
        default=CHECKPOINT_FOLDER,
        metavar="DIR",
        help="folder of the checkpoints, on a file system that all hosts share (default: %(default)s)",
    )
    group.add_argument(
        "--keep",
        type=at_least(1),
        default=CHECKPOINTS_KEPT,
        metavar="K",
        help="keep only the last K checkpoints (default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="continue from the checkpoint PATH, or from the newest in the folder PATH; any plan of the model may have "
        "written it. Without PATH, or with 'auto', continue from the newest in --checkpoint-folder, if there is one. "
        "--steps and --epochs count from the beginning of the first run",
    )


def checkpoints_of(args: argparse.Namespace) -> CheckpointOptions:
    """Return which checkpoints to write, and which to continue from."""
    from planner.workers.job import CheckpointOptions

    return CheckpointOptions(
        every=args.checkpoint_every, folder=args.checkpoint_folder, keep=args.keep, resume=args.resume
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the fields of `RunOptions`, under the same names."""
    group = parser.add_argument_group("watching the run")
    group.add_argument(
        "--hang-timeout",
        dest="hang_timeout_s",
        type=positive,
        default=HANG_TIMEOUT_S,
        metavar="SECONDS",
        help="end the run and name the cause when a worker makes no progress for SECONDS longer than the slowest "
        "instruction took (default: %(default)g)",
    )
    group.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface to listen on, such as eth0 (default: loopback on one host; under torchrun what "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write what every worker did as a Chrome trace, which Perfetto opens, as `plan simulate --trace` does",
    )
    group.add_argument(
        "--trace-minibatches",
        type=window,
        default=TRACE_MINIBATCHES,
        metavar="N|A:B",
        help="trace the last N minibatches, or those from A on and before B (default: %(default)s)",
    )
    group.add_argument(
        "--max-restarts",
        type=at_least(0),
        default=0,
        metavar="N",
        help="when a worker fails, restart all from the last complete checkpoint, at most N times (default: "
        "%(default)s); on several hosts, torchrun's --max-restarts does so",
    )
    group.add_argument(
        "--stop-on-nan",
        action="store_true",
        help="end the run when the loss of a minibatch is NaN or infinite (default: report it in the result)",
    )
