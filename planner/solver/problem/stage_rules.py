"""What a person asks of the stages of a plan, beside constraints on single layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.cost.candidate import RecomputeRule, ShardRule
from planner.cost.setting import Setting
from planner.cost.tensor import costs_at
from planner.errors import InputError
from planner.formats.profile import Profile
from planner.plan.rank_groups import groups_of
from planner.schedule.schedule import Schedule

# Where stages may begin and end: between blocks of the model, between any layers, or within blocks where that pays.
Granularity = Literal["auto", "block", "layer"]

UNLIMITED = 2**30  # units in flight


@dataclass(frozen=True)
class StageRules:
    """Which stages a search may use.

    Attributes:
        recompute: which layers recompute their activations.
        shard_optimizer: whether replicas divide the optimizer's state.
        max_stages: at most so many stages; None without a limit.
        max_staleness: gradients are at most so many updates late; None without a limit.
        granularity: where stages may begin and end.
        tensor: ranks of a replica, which divide its layers between them.
    """

    recompute: RecomputeRule = "auto"
    shard_optimizer: ShardRule = "auto"
    max_stages: int | None = None
    max_staleness: int | None = None
    granularity: Granularity = "auto"
    tensor: tuple[int, ...] = (1,)

    def deepest(self, schedule: Schedule) -> int:
        """Return the most units that a stage may have in flight, each with an older version of its weights."""
        return self.max_staleness + 1 if schedule.stashes and self.max_staleness is not None else UNLIMITED

    def check(self, profile: Profile, setting: Setting) -> None:
        """Refuse what no plan keeps.

        Raises:
            InputError: naming the argument.
            ProfileError, ClusterError: for degrees that the profile or the cluster's servers do not have.
        """
        schedule = setting.schedule
        if self.shard_optimizer == "always" and not profile.may_shard_optimizer:
            raise InputError(
                f"`shard_optimizer=always` needs an optimizer that replicas can divide, and the profile of "
                f"'{profile.model}' does not say so of its own",
                hint="profile the model again if its optimizer is one, such as Adam; or use `shard_optimizer=never`",
            )
        if self.shard_optimizer == "always" and setting.cost_model != "resource":
            raise InputError(
                f"the cost model '{setting.cost_model}' was published before optimizers were sharded",
                hint="use `cost_model=resource`, or `shard_optimizer=never`",
            )
        if not self.tensor or min(self.tensor) < 1 or list(self.tensor) != sorted(set(self.tensor)):
            given = ",".join(map(str, self.tensor))
            raise InputError(f"`tensor={given}` are no ascending numbers of ranks", hint="write them as in 1,2,4,8")
        for degree in self.tensor[int(self.tensor[0] == 1) :]:
            costs_at(profile, degree)
            groups_of(setting.cluster, degree)
        if self.max_stages is not None and self.max_stages < 1:
            raise InputError(f"`max_stages={self.max_stages}` leaves no stage", hint="give 1 or more")
        if self.max_staleness is None:
            return
        if self.max_staleness < 0:
            raise InputError(f"`max_staleness={self.max_staleness}` is no number of updates", hint="give 0 or more")
        if (late := schedule.staleness(1)) > self.max_staleness:
            raise InputError(
                f"`max_staleness={self.max_staleness}` is less than the {late} update that gradients under {schedule} "
                "are late in every plan",
                hint="use a `schedule` that drains the pipeline, such as 1f1b-flush",
            )
