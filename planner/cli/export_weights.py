"""`plan export-weights`: a checkpoint's weights in one file that other programs read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from planner.cli.arguments import Verbs, declare

DESCRIPTION = """\
Write the weights in a checkpoint to one safetensors file, under their names in the unsplit model, which loads them:

    plan export-weights checkpoints -o model.safetensors

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "export-weights", "write a checkpoint's weights to one safetensors file", DESCRIPTION)
    parser.add_argument("checkpoint", help="a checkpoint of `plan train`, or a folder whose newest one is meant")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("model.safetensors"),
        metavar="FILE",
        help="file to write (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
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
