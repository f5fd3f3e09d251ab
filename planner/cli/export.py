"""`plan export` and `plan export-weights`: a plan for another system, and a checkpoint's weights for other programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from planner.cli.arguments import Verbs, add_plan_argument, declare
from planner.cli.output import STDOUT, print_complaint, print_written

WEIGHTS = """\
Write the weights in a checkpoint to one safetensors file, under their names in the unsplit model, which loads them:

    plan export-weights checkpoints -o model.safetensors

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""
DESCRIPTION = """\
Write the plan's stage boundaries in the form that another pipeline system takes.

    plan export model.py --to torch-pipelining     a script for torchrun -> train_pipelining.py
    plan export --to deepspeed                     a PipelineModule      -> pipeline_partition.py
    plan export --to megatron                      arguments, printed
    plan export --to torchtitan                    its configuration, printed

None of these systems supports stages with different numbers of replicas: exporting such a plan is an error. None
stashes weights either: comments in the file say how the system's training differs from the plan's.
"""
FILES = {
    "torch-pipelining": "train_pipelining.py",
    "deepspeed": "pipeline_partition.py",
    "megatron": "-",
    "torchtitan": "-",
}


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    weights = declare(
        verbs, "export-weights", "write a checkpoint's weights to one safetensors file", WEIGHTS, run_weights
    )
    weights.add_argument("checkpoint", help="a checkpoint of `plan train`, or a folder whose newest one is meant")
    weights.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("model.safetensors"),
        metavar="FILE",
        help="file to write (default: %(default)s)",
    )
    parser = declare(
        verbs, "export", "write the plan for PyTorch's pipelining, DeepSpeed, Megatron or torchtitan", DESCRIPTION, run
    )
    parser.add_argument("model", nargs="?", help="model file, for torch-pipelining")
    parser.add_argument("--to", choices=list(FILES), required=True, help="the other system")
    add_plan_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write, - for stdout (default: train_pipelining.py, pipeline_partition.py; stdout for the others)",
    )


def run(args: argparse.Namespace) -> int:
    """Write or print."""
    from planner.exports import export
    from planner.formats.files import write_text
    from planner.formats.plan import load_plan

    plan = load_plan(args.plan)
    text = export(plan, args.to, model=args.model)
    if args.to != "torch-pipelining" and plan.loss is not None and plan.loss.weighs:  # as that script does
        print_complaint(
            "warning",
            f"{args.to} does not weigh microbatches by their labels as `plan train` does, so it trains another loss",
            "weigh them in the loss function: a comment in the text says how they count",
        )
    output = args.output or Path(FILES[args.to])
    if output == STDOUT:
        print(json.dumps({"text": text}) if args.json else text.rstrip("\n"))
    else:
        write_text(output, text)
        print_written(output, as_json=args.json)
    return 0


def run_weights(args: argparse.Namespace) -> int:
    """Write the file, and print what is in it."""
    from planner.executor.checkpoint.trained_weights import export_weights
    from planner.units import format_bytes

    done = export_weights(args.checkpoint, args.output)
    if args.json:
        content = {"checkpoint": str(done.checkpoint), "path": str(done.path), "tensors": done.tensors}
        print(json.dumps(content | {"size_bytes": done.size_bytes, "minibatch": done.minibatch}, indent=1))
        return 0
    print(
        f"{done.path}: {done.tensors} parameters and buffers, {format_bytes(done.size_bytes)}, "
        f"after {done.minibatch} minibatches ({done.checkpoint})"
    )
    return 0
