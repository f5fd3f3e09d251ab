"""`plan fit`: a model's name and a number of GPUs -> does it fit, how to split it, how fast is it."""

from __future__ import annotations

import argparse

from planner.cli.arguments import UNCHUNKED, Verbs, add_folder_argument, add_rule_arguments, declare, patience_of
from planner.cli.output import print_answer, print_progress
from planner.cli.records import add_options, read_options
from planner.errors import InfeasibleError
from planner.options.numbers import at_least
from planner.options.verbs import FitOptions
from planner.profiler.estimated.devices import DEVICES

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
    add_options(parser, FitOptions, "gpu", choices=list(DEVICES), type=str.lower)
    add_options(parser, FitOptions, "servers", "bandwidth", "memory", "compress", "length", "batch_size", "minibatch")
    add_options(parser, FitOptions, "dtype")
    add_options(parser, FitOptions, "schedule", choices=UNCHUNKED)
    add_rule_arguments(parser)
    help = "folder for model.py, profile.json and plan.json (default: the model's name; for a model file, its own)"
    add_folder_argument(parser, help)


def run(args: argparse.Namespace) -> int:
    """Estimate, solve, save, and print the answer."""
    from planner.api.running import fitted

    with patience_of(args) as patience:
        print_progress(f"estimating {args.model} ...")
        answer = fitted(args.model, args.gpus, read_options(FitOptions, args), patience)
    print_answer(answer, args.json)
    if answer.asked.plan is None:
        return InfeasibleError.exit_code
    files = f"{answer.model_file}, profile.json and plan.json"
    print_progress("\n" + NEXT.format(folder=answer.folder, files=files))
    return 0
