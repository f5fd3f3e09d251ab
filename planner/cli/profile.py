"""`plan profile`: model file on this device -> profile."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner.cli.arguments.batch_sizes import parse_sizes, profile_path
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.formats.profile import MemoryFormat, Profile

DESCRIPTION = """\
Measure what each layer of the model costs in training on this device: forward, backward and update time, bytes of
outputs and weights. The other verbs work from the profile that this writes, here or on another machine.

    plan profile model.py --batch-size 32

With --estimate nothing is measured and the device need not be there: times come from what each operation computes and
moves, and from a table of devices. They are for rough answers, and the profile says that they are estimated.

    plan profile model.py --batch-size 32 --estimate --device v100

With --links the links between the hosts are measured instead, point to point and in all-reduces, and written to a
cluster.json that `plan solve --cluster` takes. Start it on each host with torchrun:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m planner profile --links
"""
DEFAULT_BATCH_SIZE = 32


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "profile",
        help="measure what each layer of a model costs on this device",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", help="model file, or model.py:builder for another function than build_model"
    )
    parser.add_argument(
        "--batch-size",
        type=parse_sizes,
        default=[DEFAULT_BATCH_SIZE],
        metavar="N",
        help="samples per minibatch, or per microbatch where a schedule divides minibatches; several, as in 8,16,32, "
        "write profile-b8.json and so on, among which `plan solve --batch-size 8,16,32` chooses "
        f"(default: {DEFAULT_BATCH_SIZE})",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu, cuda or cuda:1; with --estimate cpu (one core), titan-x, titan-x-pascal, p100, v100, v100-pcie, "
        "a100, a100-80gb, h100 or h200 (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="CPU cores per worker (default: %(default)s)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="workers that will train on this machine's cores: all but the measured one take training steps beside it, "
        "as they share its caches and memory; CPU only (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="float32, or bfloat16 or float16 under autocast, which the plan then trains with; for estimates also tf32 "
        "(default: float32)",
    )
    parser.add_argument(
        "--memory-format",
        choices=["contiguous", "channels-last"],
        default="contiguous",
        help="channels-last: weights and images lie in memory pixel by pixel, as many kernels for convolutions want "
        "them, and the plan then trains so (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="run through torch.compile, as the plan's stages then will; on a CPU it needs a C++ compiler",
    )
    estimates = parser.add_argument_group("estimates")
    estimates.add_argument(
        "--estimate", action="store_true", help="estimate instead of measuring; the model is run without data"
    )
    estimates.add_argument(
        "--calibrate",
        action="append",
        type=Path,
        metavar="FILE",
        help="profile measured on such a device, with its model.py beside it, to fit the table to; may be repeated",
    )
    effort = parser.add_argument_group("measuring")
    effort.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="measure for so long, warm-up and capture not counted; at least three steps (default: 20)",
    )
    effort.add_argument("--repeats", type=int, metavar="N", help="measure at most so many steps (default: 50)")
    links = parser.add_argument_group("links")
    links.add_argument(
        "--links",
        action="store_true",
        help="measure the links between the workers that torchrun started instead of a model, and write cluster.json",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="(default: profile.json; with --links cluster.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, save, and print the profile."""
    from planner.formats.profile import save_profile
    from planner.report.tables.profile import profile_report

    if args.links:
        _run_links(args)
    if args.model is None:
        raise InputError("there is no model file to profile", hint="name one: plan profile model.py")
    output = args.output or Path("profile.json")
    several = len(args.batch_size) > 1
    profiles = []
    for size in args.batch_size:
        profiles.append(_estimated(args, size) if args.estimate else _measured(args, size))
        path = profile_path(output, size) if several else output
        save_profile(profiles[-1], path)
        print(f"written to {path}", file=sys.stderr)
    if args.json:
        texts = [profile.model_dump_json(indent=1) for profile in profiles]
        print(f"[{','.join(texts)}]" if several else texts[0])
    else:
        print("\n\n".join(map(profile_report, profiles)))
    return 0


def _run_links(args: argparse.Namespace) -> NoReturn:
    from planner.cli.worker import end_process
    from planner.formats.cluster import save_cluster
    from planner.profiler.links.levels import measure_cluster
    from planner.report.tables.cluster import cluster_report

    if args.model is not None:
        raise InputError(f"--links measures no model, but '{args.model}' was given", hint="leave one of the two out")
    cluster = measure_cluster()
    if cluster is not None:  # rank 0
        output = args.output or Path("cluster.json")
        save_cluster(cluster, output)
        print(cluster.model_dump_json(indent=1) if args.json else cluster_report(cluster))
        print(f"written to {output}", file=sys.stderr)
    end_process(0)


def _measured(args: argparse.Namespace, batch_size: int) -> Profile:
    from planner.api import profile
    from planner.profiler.measured.malloc import keep_freed_pages

    if args.calibrate is not None:
        raise InputError("--calibrate is for estimates", hint="add --estimate, or leave it out")
    keep_freed_pages()  # as the workers do
    progress = _ProgressLine() if sys.stderr.isatty() else None
    try:
        return profile(
            args.model,
            batch_size=batch_size,
            device=args.device,
            threads=args.threads,
            seconds=args.seconds,
            repeats=args.repeats,
            dtype=args.dtype or "float32",
            memory_format=_memory_format(args),
            compiled=args.compile,
            processes=args.processes,
            progress=progress,
        )
    finally:
        if progress is not None:
            progress.end()


def _estimated(args: argparse.Namespace, batch_size: int) -> Profile:
    from planner.api import estimate

    for option, number in (("--threads", args.threads), ("--processes", args.processes)):
        if number != 1:
            raise InputError(f"{option} {number} cannot be estimated", hint="a CPU is estimated as one core")
    if args.compile:
        raise InputError(
            "--compile cannot be estimated: what fusing operations saves shows on the device alone",
            hint="measure it there, or leave --compile out",
        )
    return estimate(
        args.model,
        device=args.device,
        batch_size=batch_size,
        dtype=args.dtype or "float32",
        memory_format=_memory_format(args),
        calibrate=args.calibrate or (),
    )


def _memory_format(args: argparse.Namespace) -> MemoryFormat | None:
    return "channels-last" if args.memory_format == "channels-last" else None


class _ProgressLine:
    """One line on stderr, rewritten: the phase and how much of it is done."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, phase: str, done: float) -> None:
        line = f"{phase} {done:.0%}"
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)

    def end(self) -> None:
        """Clear the line."""
        sys.stderr.write("\r" + " " * self._width + "\r")
        sys.stderr.flush()
