"""Ask `plan solve` for models on GPUs of two kinds, and price a stage for each kind beside it: see
README.md here.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

import planner
from benchmarks.expert.__main__ import _described, _gap, _trains
from benchmarks.kept import printed
from planner.catalog.models import find_model
from planner.errors import PlannerError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import profile_of_kinds, profile_on
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.blocks import blocks_of, units_of_stage
from planner.reporting.tables.verdict import share_of_speed

HERE, SIZES = Path(__file__).parent, (1, 2, 4)
TOKENS = 512 * 1024  # of a minibatch


@dataclass(frozen=True)
class Question:
    """A model on GPUs of two kinds: how many of each, in servers of equal size, and what joins
    these.
    """

    model: str
    kinds: dict[str, int]
    topology: tuple[int, ...]
    bandwidth: str


QUESTIONS = (
    Question("bert-large", {"rtx-4090": 2, "rtx-3090": 2}, (4,), "pcie4"),
    Question("gpt2-xl", {"rtx-4090": 4, "rtx-3090": 4}, (4, 2), "pcie4,10Gbps"),
    Question("llama-7b", {"a100-80gb": 4, "a10g": 8}, (4, 3), "pcie4,25Gbps"),
    Question("mistral-7b", {"h100": 8, "a100-80gb": 8}, (8, 2), "nvlink4,100Gbps"),
    Question("llama-13b", {"a100-80gb": 8, "a100": 8}, (8, 2), "nvlink3,100Gbps"),
)


def main() -> int:
    """Ask, and print the table; with names of models, only those."""
    names = [each for each in sys.argv[1:] if each != "--save"]
    rows = [answered(question) for question in QUESTIONS if not names or question.model in names]
    with printed(HERE, save="--save" in sys.argv, name="mixed.md"):
        print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    return 0


def answered(question: Question) -> dict[str, str]:
    """Return a row: the fastest answer over sizes of microbatches, beside a stage for each kind at
    the same size.
    """
    best: tuple[Plan, Profile] | None = None
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        named = find_model(question.model)
        path = named.write(Path(folder), named.tokens(None))
        for size in SIZES:
            how: dict[str, Any] = {"batch_size": size, "dtype": "bfloat16", "master_weights": True}
            profile = profile_of_kinds(
                {kind: planner.estimate(path, device=kind, **how) for kind in question.kinds}
            )
            where: dict[str, Any] = {"topology": list(question.topology)}
            if len(question.topology) == 1:
                where = {"gpus": question.topology[0]}
            cluster = planner.cluster(
                profile, bandwidth=question.bandwidth, kinds=question.kinds, **where
            )
            samples = TOKENS // (profile.tokens_per_sample or 1) // size * size
            began = time.perf_counter()
            try:
                plan = planner.solve(profile, cluster, schedule="1f1b-flush", minibatch=samples)
            except PlannerError as error:
                print(f"{question.model}, microbatches of {size}: {error.message}", file=sys.stderr)
                continue
            seconds = max(seconds, time.perf_counter() - began)
            faster = best is None or (plan.predicted.tokens_per_s or 0) > (
                best[0].predicted.tokens_per_s or 0
            )
            best = (plan, profile) if faster else best
    assert best is not None, question
    plan, profile = best
    fitting = [way for way in plan.baselines if not way.over_memory_bytes]
    fastest = min(fitting, key=lambda way: way.seconds_per_microbatch)
    row = {
        "question": f"{question.model}, "
        + " + ".join(f"{count} {kind}" for kind, count in question.kinds.items()),
        "ours": _described(plan),
        "kinds of the stages": ", then ".join(_layers(plan)),
        "tokens/s": f"{plan.predicted.tokens_per_s or 0:,.0f}",
        "over a stage per kind": _over_stages_of_kinds(profile, plan),
        "fastest of the usual ways": fastest.name,
        "over it": f"{share_of_speed(plan, fastest) ** -1:.2f}x",
        "gap": _gap(plan),
        "trains here": _trains(plan),
        "seconds": f"{seconds:.0f}",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def _layers(plan: Plan) -> list[str]:
    """Return the kinds of each stage's GPUs with its share of the layers."""
    count = sum(len(stage.layers) for stage in plan.stages)
    return [
        f"{plan.cluster.kinds_on(stage.ranks)} {len(stage.layers) / count:.0%}"
        for stage in plan.stages
    ]


def _over_stages_of_kinds(profile: Profile, plan: Plan) -> str:
    """Return how many times as fast the plan is as one stage for each kind, with blocks in
    proportion to its speed.
    """
    cluster, blocks = plan.cluster, len(blocks_of(profile))
    speeds = [
        kind.count / sum(layer.forward_s for layer in profile_on(profile, kind).layers)
        for kind in cluster.kinds
    ]
    first = min(blocks - 1, max(1, round(blocks * speeds[0] / sum(speeds))))
    priced, again = _priced(profile, cluster, plan, [first, blocks - first], {}), ""
    if max(map(priced.lacking_bytes, range(2))):
        units = {
            number: len(units_of_stage(stage.layers, ()))
            for number, stage in enumerate(priced.stages)
        }
        priced, again = (
            _priced(profile, cluster, plan, [first, blocks - first], units),
            ", recomputing",
        )
    lacks = max(map(priced.lacking_bytes, range(2)))
    over = priced.predicted.seconds_per_minibatch / plan.predicted.seconds_per_minibatch
    return f"{over:.2f}x{again}" + (
        f", does not fit ({lacks / 1e9:.0f} GB too many)" if lacks else ""
    )


def _priced(
    profile: Profile, cluster: Cluster, plan: Plan, blocks: list[int], again: dict[int, int]
) -> Plan:
    return planner.price(
        profile,
        cluster,
        blocks,
        replicas=",".join(str(kind.count) for kind in cluster.kinds),
        recompute=again,
        shard_optimizer="all",
        schedule="1f1b-flush",
        microbatches=plan.microbatches,
    )


if __name__ == "__main__":
    sys.exit(main())
