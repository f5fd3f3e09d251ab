"""`plan train` and `plan export`; `plan quickstart` and `plan selftest` of this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import planner
from planner.cli import arguments, output, solve_first
from planner.cli.results import print_result, results_left_to_workers
from planner.errors import InputError, PlanError
from planner.options.option import refuse
from planner.options.training import (
    CheckpointOptions,
    DriftOptions,
    ElasticOptions,
    RunOptions,
    TrainArguments,
    TrainingOptions,
)
from planner.options.verbs import QuickstartOptions, SelftestOptions
from planner.terminal import printable

if TYPE_CHECKING:
    from planner.selfcheck.run import Row
    from planner.workers.job import Job

TRAIN = """\
Train the model as the plan says: one process per worker on this host.

    plan train model.py --epochs 3              # by plan.json, from `plan solve`
    plan train model.py --epochs 3 --gpus 2     # profile and solve for 2 GPUs of this host first

On several hosts, start the same command on each with torchrun, and it runs as one of the plan's
workers:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 \\
        -m planner train model.py --plan plan.json

with --node-rank 1 on the second. (With --rdzv-backend c10d, torchrun assigns the ranks itself. But
if the link to HOST0 is cut, the workers end while torchrun on the host that is cut off waits for
its store for ever.) Under Slurm, the tasks of `srun plan train ...` are the workers.

Data comes from dataset() in the model file; without one, from random batches shaped like
example_batch().
"""
EXPORT = """\
Write the plan's stage boundaries in the form that another pipeline system takes.

    plan export --to megatron              its arguments
    plan export --to torchtitan            its configuration

Neither of these systems supports stages with different numbers of replicas: exporting such a plan
is an error. Neither stashes weights: comments in the file say how the system's training differs
from the plan's.
"""
QUICKSTART = """\
Profile VGG-16 on this machine, find the best plan for its GPUs or cores, train it on scikit-learn's
digits, train it again with DistributedDataParallel, and compare. The model, the profile and the
plan stay in a folder to continue from.
"""
SELFTEST = """\
Check on this machine that what the other verbs promise holds: messages arrive, models cut at every
layer compute what they compute whole, workers train as one process does under every schedule,
memory is as predicted, and a killed worker is reported with its cause. Run it first on a new
machine, and put its table into a bug report.

    plan selftest                        # the CPU, or the GPUs where there are any
    plan selftest --only links,failures  # some of the checks

It takes some minutes, uses temporary files only, and needs no network. It is for one host: run it
on each; `plan profile --links` under torchrun measures the links between them. The exit code is 1
if a row fails.
"""

NEXT = """\
{folder} holds model.py, profile.json and plan.json. Next:
  cd {folder}
  plan show                                     # stages, predictions, bottleneck
  plan solve --servers 2 --gpus-per-server 4 --bandwidth pcie4,10Gbps   \
# the same model on another cluster
  plan solve --gpus 2 --bandwidth 1Gbps && plan train model.py --epochs 3"""


def add_train(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    parser = arguments.declare(verbs, "train", "train the model as the plan says", TRAIN, train)
    parser.add_argument(
        "model", help="model file, or model.py:builder for another function than build_model"
    )
    arguments.add_plan_argument(parser)
    solve_first.add_arguments(parser)
    arguments.add_options(parser.add_mutually_exclusive_group(), TrainArguments, "steps", "epochs")
    arguments.add_options(
        parser,
        TrainArguments,
        "seed",
        "device",
        "backend",
        "save_weights",
        "defer_weights",
        "baseline",
    )
    arguments.add_options(parser.add_argument_group("how to train"), TrainingOptions)
    arguments.add_options(parser.add_argument_group("checkpoints"), CheckpointOptions)
    arguments.add_options(parser.add_argument_group("losing hosts"), ElasticOptions)
    arguments.add_options(parser.add_argument_group("watching the run"), RunOptions)
    arguments.add_options(parser.add_argument_group("keeping to the plan"), DriftOptions)


def add_export(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    summary = "write the plan for Megatron or torchtitan"
    parser = arguments.declare(verbs, "export", summary, EXPORT, export)
    parser.add_argument(
        "--to", choices=["megatron", "torchtitan"], required=True, help="the other system"
    )
    arguments.add_plan_argument(parser)
    arguments.add_output_argument(parser, output.STDOUT, "stdout")


def train(args: argparse.Namespace) -> int:
    """Train, then print what was predicted beside what was measured."""
    from planner.api.running import check_elastic, make_job, plan_left, run_job
    from planner.executor.checkpoint.folders import after_torchrun_restart, complete
    from planner.formats.files import replace
    from planner.workers.meeting import started_as_worker

    checkpoints = arguments.read_options(CheckpointOptions, args)
    losing = arguments.read_options(ElasticOptions, args)
    elastic = losing.elastic is not None
    # Under srun an elastic run's tasks are its hosts, whose workers torchrun's agents start.
    as_worker = (not elastic or "TORCHELASTIC_RUN_ID" in os.environ) and started_as_worker()
    plan = _plan(args, alone=not (as_worker or elastic))
    left = ""
    if elastic:
        refuse(args, "elastic", "baseline", why=", which changes the plan")
        check_elastic(plan, losing)
        plan, left = plan_left(plan) if as_worker else (plan, "")

    continued = None
    if as_worker or elastic:
        continued = after_torchrun_restart(checkpoints, elastic=elastic)
    asked = arguments.read_options(
        TrainArguments,
        args,
        resume=(continued or checkpoints).resume,
        profile=_profile_of(arguments.read_options(DriftOptions, args), args.plan, plan),
        show_progress=sys.stderr.isatty(),
    )
    job = replace(make_job(args.model, plan, asked), elastic=losing, left=left)
    if as_worker:
        _run_as_worker(replace(job, started_again=continued is not None), args.json)
    if elastic:
        return _run_as_host(job)
    try:
        result = run_job(job)
    except KeyboardInterrupt:
        if checkpoints.checkpoint_every is None:
            output.print_progress(
                "nothing was saved: with `checkpoint_every=N` a run writes checkpoints, and "
                "`resume` continues it"
            )
        elif complete(Path(checkpoints.checkpoint_folder)):
            output.print_progress(
                f"the same command with `resume` continues from the newest in "
                f"'{checkpoints.checkpoint_folder}'"
            )
        raise

    output.print_answer(result, args.json)
    return output.print_late(result.late_failures)


def _profile_of(options: DriftOptions, path: Path, plan: planner.Plan) -> str | None:
    """Return the file of the profile that the plan was solved from: the one that is given, or the
    one beside the plan; None where neither is it.

    Raise PlanError for a given profile that is not the plan's.
    """
    if options.drift_window == 0 or os.environ.get("RANK", "0") != "0":
        return options.profile  # only worker 0 reads it
    if options.profile is not None:
        if planner.load_profile(options.profile).digest != plan.profile_digest:
            raise PlanError(
                f"the plan '{path}' was solved from another profile than "
                f"`profile={options.profile}`",
                hint="give the plan's own, or leave `profile` out",
            )
        return options.profile

    beside = path.parent / arguments.PROFILE.name
    try:
        if planner.load_profile(beside).digest == plan.profile_digest:
            return str(beside.absolute())
    except planner.PlannerError:  # what is there is no profile, and nobody asked for it
        return None

    return None


def _plan(args: argparse.Namespace, *, alone: bool) -> planner.Plan:
    """Return the plan to train by: that of the file, or the one that is solved for first.

    Args:
        alone: whether this process starts all workers.
    """
    if not solve_first.is_asked(args):
        return planner.load_plan(args.plan)
    if not alone or args.resume is not None:
        raise InputError(
            "to solve first is for a new run on this host alone: all hosts, and all parts of a "
            "run, have the same plan",
            hint="leave out `gpus`, and solve with plan solve, whose plan.json this verb reads",
        )

    return solve_first.solved(args)


def _run_as_host(job: Job) -> int:
    from planner.executor.checkpoint.host_memory import HostMemory, note_fault
    from planner.formats.files import replace
    from planner.workers.launch import run_on_hosts, secret_file
    from planner.workers.secret import SECRET_VARIABLE

    # The same on all hosts, and when all of them are started again.
    job = replace(job, run=f"{str(job.plan.graph_hash)[:16]}-{job.seed}")
    memory = HostMemory.of(job)
    memory.make()  # or its workers would fail again and again
    try:
        with results_left_to_workers():
            code = run_on_hosts(job, ("planner", *sys.argv[1:]), partial(note_fault, job))
    except KeyboardInterrupt:
        memory.remove()
        raise

    memory.remove()
    if job.elastic.secret_file is None and SECRET_VARIABLE not in os.environ:
        secret_file(job).unlink(missing_ok=True)  # the next run makes another one
    return code


def _run_as_worker(job: Job, as_json: bool) -> NoReturn:
    from planner.api.running import trace_writer
    from planner.executor.checkpoint.folders import torchrun_run_id
    from planner.executor.worker import run_worker
    from planner.formats.files import replace
    from planner.workers.ending import end_process
    from planner.workers.job import LATE_VARIABLE

    def tell(error: planner.PlannerError) -> None:
        output.print_complaint("error", error.message, error.hint)

    job = replace(job, run=torchrun_run_id())
    code, result = run_worker(job, trace_writer(job), tell=tell)
    if result is not None:
        output.print_answer(result, as_json)
        late = output.print_late(result.late_failures)
        if late and LATE_VARIABLE in os.environ:
            Path(os.environ[LATE_VARIABLE]).touch()
        else:
            code = code or late

    end_process(code)


def export(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.formats.files import write_text

    plan = planner.load_plan(args.plan)
    text = planner.export(plan, args.to)
    if plan.loss is not None and plan.loss.weighs:
        output.print_complaint(
            "warning",
            f"{args.to} does not weigh microbatches by their labels as `plan train` does, so it "
            f"trains another loss",
            "weigh them in the loss function: a comment in the text says how they count",
        )

    if args.output == output.STDOUT:
        print_result(json.dumps({"text": text}) if args.json else printable(text.rstrip("\n")))
    else:
        write_text(args.output, text)
        output.print_written(args.output, as_json=args.json)

    return 0


def add_tours(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    parser = arguments.declare(
        verbs, "quickstart", "try profile, solve and train on this machine", QUICKSTART, quickstart
    )
    arguments.add_folder_argument(
        parser, "folder to work in (default: %(default)s)", Path("quickstart")
    )
    arguments.add_options(parser, QuickstartOptions)
    parser = arguments.declare(
        verbs,
        "selftest",
        "check that planning and training work on this machine",
        SELFTEST,
        selftest,
    )
    arguments.add_options(parser, SelftestOptions)


def quickstart(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.profiler.this_machine import keep_freed_pages

    keep_freed_pages()  # as the workers do
    options = arguments.given_options(QuickstartOptions, args) | {
        "show_progress": sys.stderr.isatty()
    }
    answer = planner.quickstart(args.place, **options, on_phase=output.print_progress)
    output.print_answer(answer, args.json)
    code = output.print_late(answer.late_failures)
    if not args.json and code == 0:
        print_result(printable(f"\n{NEXT.format(folder=args.place)}"))
    return code


def selftest(args: argparse.Namespace) -> int:
    """Run the checks, and print a table of them."""
    from planner.profiler.this_machine import keep_freed_pages

    def show(row: Row) -> None:
        output.print_progress(f"{row.result:8}{row.check}: {row.name} ({row.seconds:.0f} s)")

    keep_freed_pages()  # as the workers do
    report = planner.selftest(**arguments.given_options(SelftestOptions, args), on_row=show)
    output.print_answer(report, args.json)
    return 0 if report.passed else 1
