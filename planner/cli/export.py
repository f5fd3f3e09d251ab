"""`plan export`: the plan for another system."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Write the plan's stage boundaries in the form that another pipeline system takes.

    plan export model.py --to torch-pipelining     a script for torchrun -> train_pipelining.py
    plan export --to deepspeed                     a PipelineModule      -> pipeline_partition.py
    plan export --to megatron                      arguments, printed

None of them has stages with different numbers of replicas, nor weight stashing: the first is an error, the second is
said in the file's comments.
"""
NAMES = {"torch-pipelining": "train_pipelining.py", "deepspeed": "pipeline_partition.py"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "export",
        help="write the plan for PyTorch's pipelining, DeepSpeed or Megatron",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="model file, which torch-pipelining needs")
    parser.add_argument(
        "--to", choices=["torch-pipelining", "deepspeed", "megatron"], required=True, help="the other system"
    )
    parser.add_argument("--plan", type=Path, default=Path("plan.json"), help="the plan (default: %(default)s)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write, - for stdout (default: train_pipelining.py, pipeline_partition.py; stdout for megatron)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write or print."""
    from planner.exports import export
    from planner.formats.files import write_text
    from planner.formats.plan import load_plan

    text = export(load_plan(args.plan), args.to, model=args.model)
    output = args.output if args.output is not None else Path(NAMES.get(args.to, "-"))
    if str(output) == "-":
        print(text, end="")
    else:
        write_text(output, text)
        print(f"written to {output}", file=sys.stderr)
    return 0
