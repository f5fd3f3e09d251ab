"""The arguments that say what the stages of a plan may be like."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.arguments.numbers import at_least, degrees
from planner.schedule.instructions import LATE_UPDATES

if TYPE_CHECKING:
    from planner.solver.problem.stage_rules import StageRules

RULES = ("recompute", "shard_optimizer", "max_stages", "max_staleness", "granularity", "tensor")


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "stages"; `rules_of` reads it."""
    group = parser.add_argument_group("stages")
    group.add_argument(
        "--recompute",
        choices=["auto", "never", "always", "blocks"],
        help="run forwards again before their backward, instead of keeping the activations: as few layers as memory "
        "demands (auto), none (never), whole stages (always), or every block by itself (blocks) (default: auto)",
    )
    group.add_argument(
        "--shard-optimizer",
        choices=["auto", "never", "always"],
        help="divide the optimizer's state over the replicas of a stage: where that is better (auto), never, or always "
        "(default: auto)",
    )
    group.add_argument("--max-stages", type=at_least(1), metavar="N", help="at most N stages (default: no limit)")
    group.add_argument(
        "--max-staleness",
        type=at_least(0),
        metavar="N",
        help="gradients at most N updates late: 0 as on one device, n - 1 or more of n stages under 1f1b, 1 under 2bw "
        f"(default: no limit, and a warning above {LATE_UPDATES})",
    )
    group.add_argument(
        "--granularity",
        choices=["auto", "block", "layer"],
        help="where to cut a model of repeated blocks, as transformers are: between blocks only (block), anywhere "
        "(layer), or inside blocks only where that makes the plan 2%% faster (auto) (default: auto)",
    )
    group.add_argument(
        "--tensor",
        type=degrees,
        metavar="T,T",
        help="ranks that may divide the layers of a replica between them (tensor parallelism), as in 1,2,4,8; the "
        "profile must say what layers cost then (default: 1)",
    )


def rules_of(args: argparse.Namespace) -> StageRules:
    """Return what stages may be like, by the arguments."""
    from planner.solver.problem.stage_rules import StageRules

    return StageRules(**{name: value for name in RULES if (value := getattr(args, name)) is not None})
