"""`plan profile`: model file on this device -> profile."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from planner.cli.arguments import PROFILE, Verbs, add_options, declare, profile_path
from planner.cli.output import print_answer, print_written
from planner.errors import InputError
from planner.formats.names import DeviceType
from planner.options.numbers import batch_sizes, degrees
from planner.options.training import TrainArguments
from planner.profiler import BATCH_SIZE, REPEATS, SECONDS
from planner.profiler.estimated.devices import DEVICES
from planner.terminal import ProgressLine

if TYPE_CHECKING:
    from planner.formats.profile import MemoryFormat, Profile

DESCRIPTION = """\
Measure what each layer of the model costs in training on this device: the times of forward, backward and update, the
bytes of outputs, weights and saved activations. The other verbs need only this profile, here or on another machine.

    plan profile model.py --batch-size 32

With --estimate nothing is measured, and the device need not be there: times are computed from the arithmetic and the
memory traffic of each operation, with a table of devices. They are rough, and the profile says that they are estimated.

    plan profile model.py --batch-size 32 --estimate --device v100

With --links no model is profiled: the links between hosts are measured, point to point and in all-reduces, and written
to a cluster.json for `plan solve --cluster`. Start it on each host with torchrun:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m planner profile --links
"""

_ONLY_ESTIMATES = ("calibrate", "device_file", "fused", "master_weights", "cuda_graph")


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "profile", "measure what each layer of a model costs on this device", DESCRIPTION)
    parser.add_argument(
        "model", nargs="?", help="model file, or model.py:builder for another function than build_model"
    )
    parser.add_argument(
        "--batch-size",
        type=batch_sizes,
        default=[BATCH_SIZE],
        metavar="N",
        help="samples per minibatch, or per microbatch for schedules that divide minibatches. Several, such as "
        "8,16,32, write profile-b8.json and so on, for `plan solve --batch-size 8,16,32` to choose among "
        f"(default: {BATCH_SIZE})",
    )
    parser.add_argument(
        "--tensor",
        type=degrees,
        metavar="T,T",
        help="also profile layers that so many ranks divide between them, as in 2,4,8, for `plan solve --tensor`; the "
        "model file or the model says which are divided. One device does, as the first of these ranks; what ranks "
        "all-reduce is counted, and takes what the links of a cluster take",
    )
    _add_device_arguments(parser)
    estimates = parser.add_argument_group("estimates")
    estimates.add_argument(
        "--estimate", action="store_true", help="estimate instead of measuring; the model is run without data"
    )
    estimates.add_argument(
        "--calibrate",
        action="append",
        type=Path,
        metavar="FILE",
        help="fit the table to this profile, measured on such a device, with its model.py beside it; or to whole steps "
        "whose times are known, as a JSON file lists them; may be repeated",
    )
    estimates.add_argument(
        "--device-file", type=Path, metavar="FILE", help="estimate for the device that this JSON file describes"
    )
    estimates.add_argument(
        "--fused",
        choices=["apex"],
        help="the model runs with the fused kernels of Megatron and Apex: softmax with its scale and mask, dropout "
        "with the residual, and the optimizer",
    )
    estimates.add_argument(
        "--master-weights",
        action="store_true",
        help="weights and gradients are in --dtype, and the optimizer updates copies in float32, as in Megatron: 16 "
        "bytes per parameter with Adam. Such a profile can be solved and priced, but not trained here",
    )
    estimates.add_argument(
        "--cuda-graph",
        action="store_true",
        help="forward and backward are captured as CUDA graphs, so that small kernels do not wait for the host. `plan "
        "train` runs them one by one",
    )
    effort = parser.add_argument_group("measuring")
    effort.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help="measure for S seconds after capture and warm-up, but at least three steps (default: %(default)g)",
    )
    effort.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="measure at most N steps (default: %(default)s)"
    )
    effort.add_argument(
        "--layer-by-layer",
        action="store_true",
        help="have only some layers at a time on the device, and the rest of the model in the host's memory; a model "
        "that does not fit a GPU is measured so in any case",
    )
    links = parser.add_argument_group("links")
    links.add_argument(
        "--links",
        action="store_true",
        help="measure the links between the workers that torchrun started, instead of a model, and write cluster.json",
    )
    add_options(links, TrainArguments, "backend")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: {PROFILE}; with --links cluster.json)",
    )


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare on what, and how, the model is run."""
    parser.add_argument(
        "--device",
        help="cpu, cuda or cuda:1 (default: cuda where PyTorch sees a GPU, else cpu); with --estimate "
        f"{', '.join(DEVICES)}, where cpu is one core (default: cpu), or several with commas between: v100,t4 writes "
        "profile-v100.json and profile-t4.json",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="CPU cores per worker (default: %(default)s)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="workers that will train on this machine's CPU cores. One is measured while the others train beside it, "
        "because they compete for caches and memory bandwidth (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="TYPE",
        help="float32, bfloat16 or float16 under autocast, or on GPUs tf32 for matrix products in TF32. `plan train` "
        "will use the same "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--memory-format",
        choices=["contiguous", "channels-last"],
        default="contiguous",
        help="channels-last stores weights and images pixel by pixel, which many convolution kernels prefer. "
        "`plan train` will do the same (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="run through torch.compile, which needs a C++ compiler on a CPU; estimates, of GPUs, fuse chains of "
        "operations as it does. `plan train` will do the same",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="use only algorithms that give the same bits in every run. `plan train` will do the same",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, save, and print the profile."""
    from planner.formats.profile import save_profile
    from planner.report.tables.profile import profile_report

    if args.links:
        _run_links(args)
    if args.model is None:
        raise InputError("there is no model file to profile", hint="name one: plan profile model.py")
    output = args.output or PROFILE
    devices = args.device.split(",") if args.estimate and args.device else [args.device]
    several = len(args.batch_size) * len(devices) > 1
    profiles = []
    for device, size in product(devices, args.batch_size):
        profiles.append(_estimated(args, device, size) if args.estimate else _measured(args, size))
        path = profile_path(output, size) if len(args.batch_size) > 1 else output
        path = path.with_name(f"{path.stem}-{device}{path.suffix}") if len(devices) > 1 else path
        save_profile(profiles[-1], path)
        print_written(path)
    if args.json:
        texts = [profile.model_dump_json(indent=1) for profile in profiles]
        print(f"[{','.join(texts)}]" if several else texts[0])
    else:
        print("\n\n".join(map(profile_report, profiles)))
    return 0


def _run_links(args: argparse.Namespace) -> NoReturn:
    from planner.formats.cluster import save_cluster
    from planner.profiler.links.measure_cluster import measure_cluster
    from planner.report.tables.cluster import cluster_report
    from planner.workers.ending import end_process

    if args.model is not None:
        raise InputError(f"--links measures no model, but '{args.model}' was given", hint="leave out one of the two")
    if args.device not in (None, *get_args(DeviceType)):
        raise InputError(
            f"--links chooses a GPU for each worker, not '--device {args.device}'", hint="give --device cuda"
        )
    cluster = measure_cluster(device=args.device, backend=args.backend)
    if cluster is not None:  # rank 0
        output = args.output or Path("cluster.json")
        save_cluster(cluster, output)
        print_answer(cluster, args.json, cluster_report)
        print_written(output)
    end_process(0)


def _measured(args: argparse.Namespace, batch_size: int) -> Profile:
    from planner.api import profile
    from planner.profiler.this_machine import keep_freed_pages

    for name in _ONLY_ESTIMATES:
        if getattr(args, name):
            raise InputError(f"`{name}` is for estimates", hint=f"add `estimate`, or leave out `{name}`")
    keep_freed_pages()  # as the workers do
    line = ProgressLine() if sys.stderr.isatty() else None
    try:
        return profile(
            args.model,
            batch_size=batch_size,
            device=args.device,
            threads=args.threads,
            seconds=args.seconds,
            repeats=args.repeats,
            dtype=args.dtype,
            memory_format=_memory_format(args),
            compiled=args.compile,
            deterministic=args.deterministic,
            processes=args.processes,
            layer_by_layer=args.layer_by_layer,
            tensor=args.tensor or (),
            progress=None if line is None else lambda phase, done: line.show(f"{phase} {done:.0%}"),
        )
    finally:
        if line is not None:
            line.clear()


def _estimated(args: argparse.Namespace, device: str | None, batch_size: int) -> Profile:
    from planner.api import estimate

    for option, number in (("--threads", args.threads), ("--processes", args.processes)):
        if number != 1:
            raise InputError(f"{option} {number} cannot be estimated", hint="a CPU is estimated as one core")
    if args.deterministic:
        raise InputError("--deterministic cannot be estimated", hint="measure on the device")
    return estimate(
        args.model,
        device=device or (None if args.device_file is not None else "cpu"),
        device_file=args.device_file,
        batch_size=batch_size,
        dtype=args.dtype,
        memory_format=_memory_format(args),
        compiled=args.compile,
        fused=args.fused,
        master_weights=args.master_weights,
        cuda_graph=args.cuda_graph,
        calibrate=args.calibrate or (),
        tensor=args.tensor or (),
    )


def _memory_format(args: argparse.Namespace) -> MemoryFormat | None:
    return "channels-last" if args.memory_format == "channels-last" else None
