"""Declare a verb, and the arguments that most verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

from planner.cli.arguments.numbers import at_least
from planner.errors import InputError

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# What one verb writes, the next one reads.
PLAN, PROFILE = Path("plan.json"), Path("profile.json")


def declare(verbs: Verbs, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a new verb; `plan --help` lists it with its summary."""
    return verbs.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --plan for a verb that reads a plan and nothing else."""
    parser.add_argument("--plan", type=Path, default=PLAN, metavar="FILE", help="plan to read (default: %(default)s)")


def add_accumulate_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --accumulate for a verb that simulates a plan."""
    parser.add_argument(
        "--accumulate",
        type=at_least(1),
        metavar="K",
        help="under 1f1b, update after K minibatches per replica, as `plan train --accumulate K` does (default: 1)",
    )


def profile_path(path: Path, size: int) -> Path:
    """Return where the profile of one of several batch sizes is: profile.json becomes profile-b8.json."""
    return path.with_name(f"{path.stem}-b{size}{path.suffix}")


def given(args: argparse.Namespace, name: str) -> bool:
    """Return whether the user gave the argument."""
    return getattr(args, name) not in (None, False)


def refuse(args: argparse.Namespace, chosen: str, *others: str, why: str = "") -> None:
    """Refuse arguments that contradict the chosen one; raise InputError naming the first of them."""
    for name in others:
        if given(args, name):
            raise InputError(
                f"`{name}` has no meaning with `{chosen}`{why}", hint=f"leave out one of `{chosen}` and `{name}`"
            )
