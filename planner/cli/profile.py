"""`plan profile`: model file on this device -> profile."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NoReturn

import planner
from planner.cli.arguments import (
    PROFILE,
    Verbs,
    add_options,
    add_output_argument,
    declare,
    given_options,
)
from planner.cli.output import print_answer, print_progress, profiling, saving
from planner.errors import InputError
from planner.options.profiling import EstimateArguments, ProfileOptions
from planner.options.training import TrainArguments
from planner.profiler.estimated.devices import DEVICES

DESCRIPTION = """\
Measure what each layer of the model costs in training on this device: the times of forward,
backward and update, the bytes of outputs, weights and saved activations. The other verbs need only
this profile, here or on another machine.

    plan profile model.py --batch-size 32

With --estimate nothing is measured, and the device need not be there: times are computed from the
arithmetic and the memory traffic of each operation, with a table of devices. They are rough, and
the profile says that they are estimated.

    plan profile model.py --batch-size 32 --estimate --device v100

With --links no model is profiled: the links between hosts are measured, point to point and in
all-reduces, and written to a cluster.json for `plan solve --cluster`. Start it on each host with
torchrun:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST0 --master-port 29500 \\
        -m planner profile --links

with --node-rank 1 on the second.
"""

_ONLY_ESTIMATES = ("device_file", "host", "precision", "stack")


def add_parser(verbs: Verbs) -> None:
    """Declare the verb and its flags."""
    parser = declare(
        verbs,
        "profile",
        "measure what each layer of a model costs on this device",
        DESCRIPTION,
        run,
    )
    help = "model file, or model.py:builder for another function than build_model"
    parser.add_argument("model", nargs="?", help=help)
    add_options(parser, ProfileOptions, "batch_size")
    estimated = f"; with --estimate {', '.join(DEVICES)}, where cpu is one core"
    told = "a GPU where PyTorch sees any, else cpu; with --estimate cpu"
    add_options(parser, ProfileOptions, "device", more=estimated, told=told)
    add_options(parser, ProfileOptions, "threads", "processes", "dtype", "master_weights")
    add_options(parser, ProfileOptions, "memory_format", "compile", "deterministic", "tensor")
    add_options(parser, ProfileOptions, "context")
    estimates = parser.add_argument_group("estimates")
    help = "estimate instead of measuring; the model is run without data"
    estimates.add_argument("--estimate", action="store_true", help=help)
    add_options(estimates, EstimateArguments, *_ONLY_ESTIMATES)
    add_options(parser.add_argument_group("measuring"), ProfileOptions, "seconds", "repeats")
    links = parser.add_argument_group("links")
    help = (
        "measure the links between the workers that torchrun started, instead of a model, and "
        "write cluster.json"
    )
    links.add_argument("--links", action="store_true", help=help)
    add_options(links, TrainArguments, "backend")
    add_output_argument(parser, told=f"{PROFILE}; with --links cluster.json")


def run(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.formats.files import check_writable
    from planner.formats.profile import replace_profile

    if args.links:
        _run_links(args)
    if args.model is None:
        raise InputError(
            "there is no model file to profile", hint="name one: plan profile model.py"
        )

    output = args.output or PROFILE
    check_writable(output)
    profile = _estimated(args) if args.estimate else _measured(args)
    with saving(partial(replace_profile, profile, output), output):
        print_answer(profile, args.json)
    return 0


def _run_links(args: argparse.Namespace) -> NoReturn:
    from planner.formats.cluster import save_cluster
    from planner.profiler.links.measure_cluster import measure_cluster
    from planner.workers.ending import end_process

    if args.model is not None:
        raise InputError(
            f"--links measures no model, but '{args.model}' was given",
            hint="leave out one of the two",
        )

    if args.device is not None and ":" in args.device:
        raise InputError(
            f"--links chooses a GPU for each worker, not '--device {args.device}'",
            hint="give its kind",
        )

    def announce(workers: int, seconds: float) -> None:
        print_progress(f"measuring the links between {workers} workers takes about {seconds:.0f} s")

    cluster = measure_cluster(device=args.device, backend=args.backend, announce=announce)
    if cluster is not None:  # rank 0
        output = args.output or Path("cluster.json")
        with saving(partial(save_cluster, cluster, output), output):
            print_answer(cluster, args.json)

    end_process(0)


def _measured(args: argparse.Namespace) -> planner.Profile:
    from planner.profiler.this_machine import keep_freed_pages

    for name in _ONLY_ESTIMATES:
        if getattr(args, name):
            raise InputError(
                f"`{name}` is for estimates", hint=f"add `estimate`, or leave out `{name}`"
            )

    keep_freed_pages()  # as the workers do
    with profiling() as show:
        return planner.profile(args.model, **given_options(ProfileOptions, args), progress=show)


def _estimated(args: argparse.Namespace) -> planner.Profile:
    if {args.threads, args.processes} - {None, 1} or args.deterministic:
        wrong = "--threads, --processes and --deterministic are for measurements"
        raise InputError(wrong, hint="leave them out: a CPU is estimated as one core")
    device = args.device or (None if args.device_file is not None else "cpu")
    print_progress(f"estimating {args.model} for {device or args.device_file} ...")
    given = given_options(EstimateArguments, args) | {"device": device}
    return planner.estimate(args.model, **given)
