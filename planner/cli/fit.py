"""`plan fit`: a model's name and a number of GPUs -> does it fit, how to split it, how fast is it."""

from __future__ import annotations

import argparse
from pathlib import Path

import planner
from planner.cli.arguments import (
    PLAN,
    PROFILE,
    UNCHUNKED,
    Verbs,
    add_folder_argument,
    add_options,
    add_rule_arguments,
    declare,
    patience_of,
    read_options,
)
from planner.cli.cluster import add_compress_argument, each
from planner.cli.output import print_answer, print_progress
from planner.errors import ClusterError, InfeasibleError
from planner.formats.link_names import BETWEEN_SERVERS, link_bandwidth, usual_link
from planner.options.numbers import at_least
from planner.options.solving import SolveOptions
from planner.profiler.estimated.devices import DEVICES
from planner.schedule.one_stage import FLUSH
from planner.units import parse_bytes

USUAL = f"{FLUSH}, whose gradients are never late"
GPU, PER_SERVER = "a100-80gb", 8
TOKENS, SAMPLES = 2048, 16  # of a microbatch: tokens where samples have many, else samples
DESCRIPTION = """\
Say in one screen whether a model fits your GPUs, how to split it, how fast it would train, what other ways would give,
and how few GPUs would do. All numbers are estimates: nothing is measured, and no weights are made or downloaded.

    plan fit llama-7b --gpus 8 --gpu a100-80gb
    plan fit path/to/config.json --gpus 16 --servers 2 --gpu l4 --bandwidth 4GB/s,25Gbps
    plan fit model.py --gpus 4 --gpu rtx-4090

A name or a config.json of Hugging Face needs the package transformers. A folder then gets model.py, which builds that
model; profile.json and plan.json are left beside it, for the other verbs.
"""
NEXT = """\
{folder} holds {files}. Next:
  cd {folder}
  plan show                                     # stages, memory, what limits the plan
  plan report                                   # all of it, with a timeline
  plan train model.py                           # on those GPUs, with a dataset() in model.py"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    summary = "from a model's name: does it fit, how to split it, how fast is it"
    parser = declare(verbs, "fit", summary, DESCRIPTION, run)
    help = "llama-7b, gpt2-xl, ...; a class of transformers; its config.json; or a model file"
    parser.add_argument("model", help=help)
    parser.add_argument("--gpus", type=at_least(1), required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--gpu", choices=list(DEVICES), default=GPU, help="kind of GPU (default: %(default)s)")
    help = f"servers that the GPUs are divided over (default: {PER_SERVER} GPUs in each)"
    parser.add_argument("--servers", type=at_least(1), metavar="N", help=help)
    parser.add_argument(
        "--bandwidth",
        type=each(link_bandwidth),
        metavar="RATE",
        help="of each GPU's link inside a server, and with several servers also of each server's: nvlink4,100Gbps "
        f"(default: what such GPUs usually have, and {BETWEEN_SERVERS} between servers)",
    )
    help = "memory of each GPU (default: that of its kind)"
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help=help)
    add_compress_argument(parser)
    parser.add_argument("--length", type=at_least(1), metavar="N", help="tokens of a sample (default: up to 2048)")
    help = f"samples of a microbatch (default: as many as have {TOKENS} tokens, or {SAMPLES})"
    parser.add_argument("--batch-size", type=at_least(1), metavar="N", help=help)
    add_options(parser, SolveOptions, "minibatch")
    help = "of products, under autocast; weights are float32 (default: %(default)s)"
    parser.add_argument("--dtype", default="bfloat16", help=help)
    add_options(parser, SolveOptions, "schedule", choices=UNCHUNKED, default=FLUSH.name, told=USUAL)
    add_rule_arguments(parser)
    help = "folder for model.py, profile.json and plan.json (default: the model's name; for a model file, its own)"
    add_folder_argument(parser, help)


def run(args: argparse.Namespace) -> int:
    """Estimate, solve, save, and print the answer."""
    from planner.analysis.fit import fit
    from planner.catalog.models import find_model
    from planner.reporting.tables.fit import fit_report

    per_server = _per_server(args)
    with patience_of(args) as patience:
        path, tokens = Path(args.model), None
        folder = args.place or path.parent
        if path.suffix != ".py":
            model = find_model(args.model)
            tokens = model.tokens(args.length)
            folder = args.place or Path(model.name)
            path = model.write(folder, tokens)
        size = args.batch_size or (SAMPLES if tokens is None else max(1, TOKENS // tokens))
        profile = planner.estimate(path, device=args.gpu, batch_size=size, dtype=args.dtype)
        planner.save_profile(profile, folder / PROFILE)
        memory_bytes = args.memory or profile.device.memory_bytes
        answer = fit(
            profile,
            args.gpus,
            lambda gpus: _cluster(args, memory_bytes, gpus, per_server),
            read_options(SolveOptions, args),
            patience,
        )
    print_answer(answer, args.json, fit_report)
    if answer.asked.plan is None:
        return InfeasibleError.exit_code
    planner.save_plan(answer.asked.plan, folder / PLAN)
    print_progress("\n" + NEXT.format(folder=folder, files=f"{path.name}, {PROFILE} and {PLAN}"))
    return 0


def _per_server(args: argparse.Namespace) -> int:
    """Return the number of GPUs in each server."""
    servers = args.servers or -(-args.gpus // PER_SERVER)
    if args.bandwidth is not None and len(args.bandwidth) != (2 if servers > 1 else 1):
        raise ClusterError(
            f"the bandwidth has {len(args.bandwidth)} rates, and there are {servers} servers",
            hint="give one for GPUs in one server, else two, inside a server and between servers: nvlink4,100Gbps",
        )
    if args.gpus % servers:
        uneven = f"{args.gpus} GPUs are not divided evenly over {servers} servers"
        raise ClusterError(uneven, hint="give another number of `servers`")
    return int(args.gpus // servers)


def _cluster(args: argparse.Namespace, memory_bytes: int | None, gpus: int, per_server: int) -> planner.Cluster:
    """Return so many GPUs in as few servers of up to that size as hold equally many."""
    from planner.formats.cluster import hierarchical_cluster

    rates = args.bandwidth or [link_bandwidth(usual_link(args.gpu))]
    if gpus <= per_server:  # only one level: fewer GPUs than were asked about, or all in one server
        cluster = planner.flat_cluster(gpus, rates[0], memory_bytes)
    else:
        servers = next(count for count in range(-(-gpus // per_server), gpus + 1) if gpus % count == 0)
        between = rates[1] if len(rates) > 1 else link_bandwidth(BETWEEN_SERVERS)
        cluster = hierarchical_cluster([gpus // servers, servers], [rates[0], between], memory_bytes)
    return cluster.model_copy(update={"compress": args.compress or "none"})
