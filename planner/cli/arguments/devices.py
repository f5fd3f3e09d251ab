"""The arguments that say where workers compute and what they send with."""

from __future__ import annotations

import argparse
from typing import get_args

from planner.formats.names import Backend, DeviceType


def add_device_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the kind of device; `default` says in words what it is without."""
    parser.add_argument("--device", choices=get_args(DeviceType), help=f"compute on CPUs or GPUs (default: {default})")


def add_backend_argument(parser: argparse._ActionsContainer) -> None:
    """Declare what messages are sent with."""
    parser.add_argument(
        "--backend",
        choices=get_args(Backend),
        help="send messages with NCCL, which needs a GPU for each worker, or with gloo, over which several workers "
        "may share a GPU (default: nccl with --device cuda, gloo with cpu)",
    )
