"""Compare our configurations and predicted speed-ups with those that PipeDream published. See
README.md here.

python -m benchmarks.published.configs
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from tabulate import tabulate

from benchmarks.kept import ROOT
from benchmarks.published.configs.fixed import best_cuts
from benchmarks.published.configs.rows import MODELS, ROWS, Row
from benchmarks.published.cost_models import PublishedPlan, solve_published
from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.network.link import link_of
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.spec import load_model_file
from planner.profiler.estimated.devices import device_spec
from planner.profiler.estimated.estimate import profile_of_trace
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.trace import StepTrace, trace_step
from planner.solver import search_plan as solve


@dataclass(frozen=True)
class Answer:
    """Our answer to a row."""

    row: Row
    ours: Plan | None
    published_model: PublishedPlan | None
    theirs_over_one: float | None
    theirs_over_data_parallel: float | None
    theirs_fits: bool
    theirs_busiest: str
    data_parallel_over_one: float
    implied_bandwidth_bytes_per_s: float | None
    at_implied: str


@cache
def _trace(model: str, minibatch: int) -> StepTrace:
    return trace_step(load_model_file(ROOT / MODELS[model]), minibatch, execution=Execution("cuda"))


@cache
def _profile(model: str, minibatch: int, device: str) -> Profile:
    spec = device_spec(device, "float32")
    return profile_of_trace(_trace(model, minibatch), spec)


def profile_of_row(row: Row) -> Profile:
    """Return the estimated profile for the row's device and minibatch."""
    return _profile(row.model, row.minibatch, row.site.device)


def implied_bandwidth(row: Row) -> float | None:
    """Return the bandwidth at which we predict data parallelism's published speed-up; None where
    none is published.
    """
    layer_costs = LayerCosts(profile_of_row(row))
    whole = layer_costs.work(
        Candidate(frozenset(), frozenset(range(len(layer_costs.profile.layers))))
    )
    return _implied_bandwidth(row, layer_costs, float(whole.compute_s))


def answer(row: Row) -> Answer:
    """Solve a row, and price its published configuration."""
    profile = profile_of_row(row)
    memory_bytes = profile.device.memory_bytes
    cluster = row.site.cluster(row.servers, memory_bytes)
    free = cluster.model_copy(update={"memory_bytes": None})
    layer_costs = LayerCosts(profile)
    whole = layer_costs.work(Candidate(frozenset(), frozenset(range(len(profile.layers)))))
    one_s = float(whole.compute_s)
    data_parallel_s = _data_parallel_s(layer_costs, cluster)
    theirs = best_cuts(layer_costs, free, row.replicas)
    implied = _implied_bandwidth(row, layer_costs, one_s)
    at_implied = ""
    if implied is not None:
        slower = row.site.cluster(
            row.servers, memory_bytes, implied / cluster.slowest_bandwidth_bytes_per_s
        )
        plan = _solved(profile, slower)
        at_implied = (
            "" if plan is None else f"{plan.config} ({plan.predicted.speedup_over_one_gpu:.2f})"
        )
    return Answer(
        row=row,
        ours=_solved(profile, cluster),
        published_model=_by_the_published_model(profile, free),
        theirs_over_one=None if theirs is None else one_s / theirs.seconds,
        theirs_over_data_parallel=None if theirs is None else data_parallel_s / theirs.seconds,
        theirs_fits=theirs is not None
        and (memory_bytes is None or theirs.memory_bytes <= memory_bytes),
        theirs_busiest="" if theirs is None else theirs.busiest,
        data_parallel_over_one=one_s / data_parallel_s,
        implied_bandwidth_bytes_per_s=implied,
        at_implied=at_implied,
    )


def _solved(profile: Profile, cluster: Cluster) -> Plan | None:
    try:
        return solve(profile, cluster)
    except InfeasibleError:
        return None


def _by_the_published_model(profile: Profile, cluster: Cluster) -> PublishedPlan | None:
    """Return the published optimizer's answer; None on clusters of several levels, which our search
    has not by it.
    """
    if len(cluster.levels) > 1:
        return None
    return solve_published(profile, cluster.gpus, cluster.slowest_bandwidth_bytes_per_s)


def _data_parallel_s(layer_costs: LayerCosts, cluster: Cluster) -> float:
    whole = layer_costs.work(
        Candidate(frozenset(), frozenset(range(len(layer_costs.profile.layers))))
    )
    return float(AsynchronousModel(link_of(cluster)).stage_s(whole, float(cluster.gpus)))


def _implied_bandwidth(row: Row, layer_costs: LayerCosts, one_s: float) -> float | None:
    """Return the bandwidth at which we predict data parallelism's published speed-up over one
    machine.
    """
    if row.data_parallel_over_one is None:
        return None
    low, high = 1e6, 1e12
    for _ in range(80):
        middle = (low * high) ** 0.5
        factor = middle / row.site.cluster(row.servers, None).slowest_bandwidth_bytes_per_s
        speedup = one_s / _data_parallel_s(layer_costs, row.site.cluster(row.servers, None, factor))
        low, high = (middle, high) if speedup < row.data_parallel_over_one else (low, middle)
    return float((low * high) ** 0.5)


def _config(plan: Plan | None, gpus: int) -> str:
    return "does not fit" if plan is None else _config_of(plan.replicas, gpus)


def _config_of(replicas: Sequence[int], gpus: int) -> str:
    straight = set(replicas) == {1} and len(replicas) >= 4
    config = f"straight, {len(replicas)}" if straight else "-".join(map(str, replicas))
    return config + ("" if sum(replicas) == gpus else f" ({sum(replicas)} GPUs)")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cut(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def tables(answers: list[Answer]) -> str:
    """Return the tables of configurations and speed-ups, and of the reasons why they differ."""
    first, second = [], []
    for a in answers:
        row, ours, published = a.row, a.ours, a.published_model
        said = ours.predicted if ours is not None else None
        first.append(
            [
                row.table,
                row.name,
                row.config,
                _times(row.over_one),
                _times(row.over_data_parallel),
                _cut(row.communication_cut),
                _config(ours, row.gpus),
                _times(said.speedup_over_one_gpu if said else None),
                _times(said.speedup_over_data_parallel if said else None),
                _cut(said.communication_cut if said else None),
                "" if ours is None else ours.solver.status,
                "" if published is None else _config_of(published.path.replicas, row.gpus),
                _times(published.over_data_parallel if published else None),
            ]
        )
        implied = a.implied_bandwidth_bytes_per_s
        second.append(
            [
                row.table,
                row.name,
                row.config,
                _times(a.theirs_over_one),
                _times(a.theirs_over_data_parallel),
                "" if a.theirs_fits else "does not fit",
                a.theirs_busiest,
                _times(row.data_parallel_over_one),
                _times(a.data_parallel_over_one),
                "" if implied is None else f"{implied * 8 / 1e9:.1f}",
                a.at_implied,
            ]
        )
    heads = ["paper", "row", "config", "over 1", "over DP", "comm. cut"]
    heads += [
        "ours",
        "over 1",
        "over DP",
        "comm. cut",
        "status",
        "by the published model",
        "over DP",
    ]
    why = [
        "paper",
        "row",
        "its config",
        "priced here: over 1",
        "over DP",
        "memory",
        "busiest",
        "DP over 1, paper",
    ]
    why += [
        "DP over 1, here",
        "implied Gbps",
        "ours at that (over 1)",
    ]
    return "\n\n".join(
        tabulate(rows, headers=head, tablefmt="pipe", disable_numparse=True)
        for rows, head in ((first, heads), (second, why))
    )


def main() -> None:
    """Solve all rows and print both tables as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=sorted(MODELS), choices=sorted(MODELS), help="models"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    answers = []
    for row in ROWS:
        if row.model in arguments.only:
            started = time.process_time()
            answers.append(answer(row))
            seconds = time.process_time() - started
            what = f"{row.table} {row.model} {row.site.name} {row.gpus}"
            print(f"{what}: {seconds:.1f} s of CPU", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        )
    )
    print(tables(answers))


if __name__ == "__main__":
    main()
