"""What a person asks of the stages of a plan, beside constraints on single layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.cost.stage_options import RecomputeRule, ShardRule
from planner.errors import InputError

# Where stages may begin and end: between blocks of the model, between any layers, or within blocks where that pays.
Granularity = Literal["auto", "block", "layer"]


@dataclass(frozen=True)
class StageRules:
    """Which stages a search may use.

    Attributes:
        recompute: which layers recompute their activations.
        shard_optimizer: whether replicas divide the optimizer's state.
        max_stages: at most so many stages; None without a limit.
        max_staleness: gradients are at most so many updates late; None without a limit.
        granularity: where stages may begin and end.
    """

    recompute: RecomputeRule = "auto"
    shard_optimizer: ShardRule = "auto"
    max_stages: int | None = None
    max_staleness: int | None = None
    granularity: Granularity = "auto"

    def check_known(self) -> None:
        """Refuse what no search does yet.

        Raises:
            InputError: naming the argument.
        """
        for name, value, known in (
            ("recompute", self.recompute, self.recompute != "blocks"),
            ("shard_optimizer", self.shard_optimizer, self.shard_optimizer != "always"),
            ("max_stages", self.max_stages, self.max_stages is None),
            ("max_staleness", self.max_staleness, self.max_staleness is None),
        ):
            if not known:
                raise InputError(f"`{name}={value}` is not there yet", hint=f"leave out `{name}`")
