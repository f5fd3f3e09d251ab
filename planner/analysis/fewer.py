"""What the loss of a host costs, for a plan with those for the GPUs that are left."""

import math
from collections import Counter
from dataclasses import dataclass

from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.options.training import ElasticOptions

COPY_EVERY = ElasticOptions().copy_every  # minibatches
_COPIES = 2  # that a host holds: a whole one, and the next one while it is made
_TRIED = 64  # hosts whose loss is priced, where there are more


@dataclass(frozen=True)
class LossCost:
    """What copies of the state take while nothing fails, and what the loss of one host takes."""

    memory_bytes: int  # of the host that holds most
    copy_s: float  # of the link of the host that sends most
    # Until the hosts that are left have the state of their stages in the next smaller plan, at most; infinite for a
    # plan on one host, of which no other one has a copy.
    restore_s: float


def cost_of_loss(plan: Plan) -> LossCost:
    """Price copies and the loss of one host, for a plan with a smaller one: bytes over the hosts' links.

    As `planner.executor.checkpoint.copies` has it: a replica on each host writes the state of its stage, or only the
    first one and sends it to the next host, where ranks divide the state, the stage has buffers, or it is on one host.
    """
    outer = plan.cluster.joined[-1]
    per_host, rate = plan.cluster.gpus // outer.size, outer.bandwidth_bytes_per_s
    used = sorted({rank // per_host for stage in plan.stages for rank in stage.ranks})
    after = dict(zip(used, [*used[1:], *used[:1]], strict=True))
    state = [_state_bytes(plan, stage) for stage in plan.stages]
    held, sent, holders = Counter[int](), Counter[int](), list[set[int]]()
    for stage, size in zip(plan.stages, state, strict=True):
        hosts, first = {rank // per_host for rank in stage.ranks}, stage.ranks[0] // per_host
        if len(hosts) == 1 or stage.tensor > 1 or stage.sharded or stage.memory.buffers_bytes:
            hosts = {first, after[first]}
            sent[first] += size * (len(hosts) - 1)
        holders.append(hosts)
        held.update(dict.fromkeys(hosts, size))
    left = plan.smaller[0]
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    wanted: dict[int, set[int]] = {}  # stages of this plan whose state a host of the smaller one needs
    for stage in left.stages:
        for rank in stage.ranks:
            wanted.setdefault(rank // per_host, set()).update(stage_of[layer] for layer in stage.layers)
    moved = [0]
    for lost in range(0, outer.size, -(-outer.size // _TRIED)):
        passing = Counter[tuple[str, int]]()
        for turn, (place, stages) in enumerate(sorted(wanted.items())):
            host = place + (place >= lost)
            for number in stages:
                having = sorted(each for each in holders[number] if each != lost)
                if not having:  # all of the plan is on one host
                    return LossCost(_COPIES * max(held.values()), 0.0, math.inf)
                if host not in having:
                    passing["receives", host] += state[number]
                    passing["sends", having[turn % len(having)]] += state[number]
        moved += passing.values()
    return LossCost(_COPIES * max(held.values()), max(sent.values(), default=0) / rate, max(moved) / rate)


def _state_bytes(plan: Plan, stage: Stage) -> int:
    """Return the bytes of a stage's weights, buffers and optimizer state, of all ranks that divide them."""
    memory = stage.memory
    weights_bytes = memory.weights_bytes // plan.schedule.versions(stage.in_flight)
    optimizer_bytes = memory.optimizer_bytes * (stage.replicas if stage.sharded else 1)
    return stage.tensor * (weights_bytes + memory.buffers_bytes + optimizer_bytes)


def shares_left(plan: Plan) -> str | None:
    """Say what each loss costs: "7 of 8 GPUs: 88% of the speed, 6: 71%"; None for a plan without smaller ones."""
    parts = []
    for number, left in enumerate(plan.smaller):
        share = plan.predicted.seconds_per_minibatch / left.predicted.seconds_per_minibatch
        gpus, of_speed = (f" of {plan.cluster.gpus} GPUs", " of the speed") if number == 0 else ("", "")
        parts.append(f"{left.cluster.gpus}{gpus}: {share:.0%}{of_speed} ({left.config})")
    return ", ".join(parts) or None
