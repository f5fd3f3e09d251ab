"""What the loss of a host costs, for a plan with those for the GPUs that are left."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.options.training import ElasticOptions
from planner.solver.tuning.record import STANDARD, Tuning

COPY_EVERY = ElasticOptions().copy_every  # minibatches
_COPIES = 2  # that a host holds: a whole one, and the next one while it is made


@dataclass(frozen=True)
class LossCost:
    """What copies of the state take while nothing fails, and what the loss of one host takes."""

    memory_bytes: int  # of the host that holds most
    copy_s: float  # of the link of the host that sends most
    # Until the hosts that are left have the state of their stages in the next smaller plan, at
    # most; infinite for a plan on one host, of which no other one has a copy.
    restore_s: float


def cost_of_loss(plan: Plan, tuning: Tuning = STANDARD) -> LossCost:
    """Price copies and the loss of one host, for a plan with a smaller one: bytes over the hosts'
    links.
    """
    outer = plan.cluster.joined[-1]
    copies = _copies(plan, plan.cluster.gpus // outer.size)
    memory_bytes = _COPIES * max(copies.held_bytes().values())

    wanted = _wanted_stages(plan, plan.smaller[0], copies.per_host)
    every = -(-outer.size // tuning.what_if.most_lost_hosts)
    moved_bytes = max(_moved_bytes(copies, wanted, lost) for lost in range(0, outer.size, every))
    if math.isinf(moved_bytes):
        return LossCost(memory_bytes, 0.0, math.inf)

    rate = outer.bandwidth_bytes_per_s
    sent_bytes = max(copies.sent_bytes.values(), default=0)
    return LossCost(memory_bytes, sent_bytes / rate, moved_bytes / rate)


@dataclass(frozen=True)
class _Copies:
    """Which hosts hold the state of each stage, as `planner.executor.checkpoint.copies` has it.

    A replica on each host writes the state of its stage, or only the first one and sends it to the
    next host, where ranks divide the state, the stage has buffers, or it is on one host.
    """

    per_host: int  # GPUs
    state_bytes: tuple[int, ...]  # of each stage
    holders: tuple[frozenset[int], ...]  # of each stage
    sent_bytes: Counter[int]  # by each host, for one copy

    def held_bytes(self) -> Counter[int]:
        """Return what each host holds for one copy of all its stages."""
        held = Counter[int]()
        for size, hosts in zip(self.state_bytes, self.holders, strict=True):
            held.update(dict.fromkeys(hosts, size))
        return held


def _copies(plan: Plan, per_host: int) -> _Copies:
    used = sorted({rank // per_host for stage in plan.stages for rank in stage.ranks})
    next_host = dict(zip(used, [*used[1:], *used[:1]], strict=True))

    state_bytes = []
    holders = []
    sent_bytes = Counter[int]()
    for stage in plan.stages:
        size = _state_bytes(plan, stage)
        hosts = frozenset(rank // per_host for rank in stage.ranks)
        if len(hosts) == 1 or _is_sent(stage):
            first = stage.ranks[0] // per_host
            hosts = frozenset({first, next_host[first]})
            sent_bytes[first] += size * (len(hosts) - 1)

        state_bytes.append(size)
        holders.append(hosts)

    return _Copies(per_host, tuple(state_bytes), tuple(holders), sent_bytes)


def _is_sent(stage: Stage) -> bool:
    """Whether the state of a stage on several hosts is sent, because no replica alone has all of
    it.
    """
    divides = stage.divides_layers or stage.shards_optimizer
    return divides or stage.memory.buffers_bytes > 0


def _wanted_stages(plan: Plan, smaller: Plan, per_host: int) -> list[tuple[int, set[int]]]:
    """Return for each host of the smaller plan, in order, the stages of this one whose state it
    needs.
    """
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    wanted: dict[int, set[int]] = {}
    for stage in smaller.stages:
        needed = {stage_of[layer] for layer in stage.layers}
        for rank in stage.ranks:
            wanted.setdefault(rank // per_host, set()).update(needed)

    return sorted(wanted.items())


def _moved_bytes(copies: _Copies, wanted: Sequence[tuple[int, set[int]]], lost: int) -> float:
    """Return the bytes over the busiest link until each host has its stages; infinity where nobody
    has one of them.
    """
    passing = Counter[tuple[str, int]]()
    for turn, (place, stages) in enumerate(wanted):
        host = place + (place >= lost)
        for number in stages:
            senders = sorted(copies.holders[number] - {lost})
            if not senders:  # all of the plan is on one host
                return math.inf
            if host in senders:
                continue

            sender = senders[turn % len(senders)]
            passing["receives", host] += copies.state_bytes[number]
            passing["sends", sender] += copies.state_bytes[number]

    return max(passing.values(), default=0)


def _state_bytes(plan: Plan, stage: Stage) -> int:
    """Return the bytes of a stage's weights, buffers and optimizer state, of all ranks that divide
    them.
    """
    memory = stage.memory
    weights_bytes = memory.weights_bytes // plan.schedule.versions(stage.in_flight)
    optimizer_bytes = memory.optimizer_bytes * stage.shards
    return stage.ranks_per_replica * (weights_bytes + memory.buffers_bytes + optimizer_bytes)


def shares_left(plan: Plan) -> str | None:
    """Say what each loss costs: "7 of 8 GPUs: 88% of the speed, 6: 71%"; None for a plan without
    smaller ones.
    """
    parts = list[str]()
    for left in plan.smaller:
        share = plan.predicted.seconds_per_minibatch / left.predicted.seconds_per_minibatch
        if parts:
            parts.append(f"{left.cluster.gpus}: {share:.0%} ({left.config})")
        else:
            parts.append(
                f"{left.cluster.gpus} of {plan.cluster.gpus} GPUs: {share:.0%} of the speed "
                f"({left.config})"
            )

    return ", ".join(parts) or None
