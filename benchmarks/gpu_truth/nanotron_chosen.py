"""What the planner answers for the jobs of nanotron's runs, beside the best that was measured.

python -m benchmarks.gpu_truth.nanotron_chosen

It has the same model, microbatch, minibatch and GPUs, 1F1B with a flush, and may choose layers,
replicas, ranks of each stage, what recomputes and what replicas divide. Both plans are priced
alike; neither was run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from tabulate import tabulate

from benchmarks.gpu_truth.by_layers import divided
from benchmarks.gpu_truth.nanotron import (
    EAGER,
    H100,
    NICS,
    NVLINK,
    PER_SERVER,
    Run,
    layer_of,
    links_of,
    profile_of,
    runs,
    stages_of,
    times_of,
    usual_rates,
)
from benchmarks.gpu_truth.rows import price
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.names import PLANNED
from planner.formats.own_plan import OwnStage
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.profile import Layer, Profile
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve

_DEGREES = (1, 2, 4, 8)
_HEADERS = (
    "billion",
    "GPUs",
    "best measured",
    "measured s",
    "priced s",
    "chosen",
    "priced s",
    "the run takes",
)


def profile(run: Run) -> Profile:
    """Return the model at the run's microbatch, with what one of several ranks does that divide its
    layers.
    """
    blocks = [kind for stage in stages_of(run.llama, 1) for kind in stage]
    whole, *parts = (
        profile_of(
            [_layer(replace(run, llama=llama), *each) for each in enumerate(blocks)],
            run.samples,
            H100,
        )
        for llama in (replace(run.llama, tensor=t) for t in _DEGREES)
    )
    nothing = [0] * len(blocks)  # what collectives take is in the times of layers
    return divided(whole, dict(zip(_DEGREES[1:], parts, strict=True)), (nothing, nothing))


def _layer(run: Run, number: int, kind: str) -> Layer:
    alone = replace(run, replicas=1, stages=2, sharded=False, checked=False)
    device, host = times_of(alone, kind, H100, EAGER, links_of(alone, EAGER))
    return layer_of(alone, kind, number, np.maximum(device, host), H100)


def cluster(gpus: int) -> Cluster:
    """Return servers of H100 whose all-reduces are as fast as jobs measured."""
    assert H100.memory_bytes is not None
    usable = {"memory_bytes": round(PLANNED * H100.memory_bytes)}
    if gpus == PER_SERVER:
        return flat_cluster(gpus, NVLINK).model_copy(update=usable)
    servers = gpus // PER_SERVER
    there = hierarchical_cluster((PER_SERVER, servers), (NVLINK, NICS))
    inner, outer = there.levels
    rate = min(NICS, usual_rates()[servers].reduce_bytes_per_s)
    outer = outer.model_copy(update={"all_reduce_bandwidth_bytes_per_s": rate})
    return there.model_copy(update={"levels": (inner, outer), **usable})


def measured(run: Run, there: Profile) -> Plan:
    """Price a run's configuration."""
    names = iter(layer.name for layer in there.layers)
    stages = [
        OwnStage(
            layers=tuple(next(names) for _ in blocks),
            replicas=run.replicas,
            tensor=run.llama.tensor,
            sharded=run.sharded and run.replicas > 1,
        )
        for blocks in stages_of(run.llama, run.stages)
    ]
    return price(there, cluster(run.gpus), stages, run.microbatches * run.replicas)


def rows(time_limit_s: float, jobs: Sequence[tuple[float, int]]) -> Iterator[list[str]]:
    """Yield a line per job."""
    trained = [run for run in runs() if run.seconds is not None]
    for job in sorted({run.job for run in trained}):
        if jobs and job not in jobs:
            continue
        best = min(
            (run for run in trained if run.job == job),
            key=lambda run: (run.seconds or 0.0) / run.minibatch,
        )
        there = profile(best)
        theirs = measured(best, there)
        how = (
            f"tp {best.llama.tensor}, pp {best.stages}, dp {best.replicas}, microbatch "
            f"{best.samples}"
        )
        how += ", ZeRO-1" * best.sharded
        cells = [
            *map(str, job),
            how,
            f"{best.seconds:.3g}",
            f"{theirs.predicted.seconds_per_minibatch:.3g}",
        ]
        try:
            plan = solve(
                there,
                cluster(best.gpus),
                schedule=FLUSH,
                microbatches=best.microbatches * best.replicas,
                tensor=_DEGREES,
                time_limit_s=time_limit_s,
            )
        except PlannerError as error:
            yield [*cells, error.message, "", ""]
            continue
        own_s = plan.predicted.seconds_per_minibatch
        ours = short_config(plan.config)
        ours += "".join(
            f", ZeRO-{level}" for level in sorted({stage.level for stage in plan.stages} - {0})
        )
        ours += ", recomputing" if any(stage.recomputes for stage in plan.stages) else ""
        yield [
            *cells,
            ours,
            f"{own_s:.3g}",
            f"{theirs.predicted.seconds_per_minibatch / own_s - 1:+.1%}",
        ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="only jobs on so many")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="S", help="seconds (default: %(default)s)"
    )
    arguments = parser.parse_args()
    jobs, lines = (
        [run.job for run in runs() if run.gpus in (arguments.gpus or ())],
        list[list[str]](),
    )
    for line in rows(arguments.time_limit, jobs):
        print(line, file=sys.stderr, flush=True)
        lines.append(line)
    print(tabulate(lines, headers=_HEADERS, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
