"""`plan export-weights`: a checkpoint's weights in one file that other programs read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DESCRIPTION = """\
Write the weights in a checkpoint to one safetensors file, under their names in the model, for the unsplit model:

    plan export-weights checkpoints -o model.safetensors

    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "export-weights",
        help="the weights in a checkpoint, as one safetensors file",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint of plan train, or a folder of them, of which the newest is taken"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("model.safetensors"),
        metavar="FILE",
        help="where to write (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file, and say what is in it."""
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
