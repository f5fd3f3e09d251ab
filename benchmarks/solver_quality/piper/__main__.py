"""Answer the questions of Piper's program, and compare with its answers. See README.md in this
folder.

python -m benchmarks.solver_quality.piper --input bert32a100 --devices 128
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from benchmarks.gpu_truth.rows import ANCHORS, anchors
from benchmarks.solver_quality.piper.formulas import Formulas, PiperStage
from benchmarks.solver_quality.piper.graphs import load_piper
from benchmarks.solver_quality.piper.question import answered
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.tensor import layer_costs_on
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import config_of, short_config
from planner.formats.profile import Profile
from planner.options.solving import StageRules
from planner.schedule.one_stage import TWO_BW
from planner.solver import search_plan as solve
from planner.solver.problem.problem import Problem

HEADERS = [
    "graph",
    "memory",
    "GPUs",
    "Piper's s",
    "ours",
    "memory",
    "plan",
    "Piper took s",
    "we took CPU s",
]
OWN_HEADERS = [
    *HEADERS[:5],
    "Piper's, by our cost",
    "ours, by our cost",
    "memory, by Piper's",
    *HEADERS[6:],
]
UNANSWERED = (2, 4, 10)  # devices for which the program did not end on the graph of GNMT


def main() -> None:
    """Print a line per run of the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", help="of these graphs only")
    parser.add_argument("--devices", type=int, nargs="+", help="with so many GPUs only")
    parser.add_argument("--memory", type=int, nargs="+", help="of so many GiB only")
    parser.add_argument(
        "--own", action="store_true", help="what `plan solve` answers, by its own costs"
    )
    args = parser.parse_args()
    content, rows = anchors("piper.json"), []
    gnmt = next(each for each in content["inputs"] if "gnmt" in each["file"])
    unanswered = [
        {
            "input": "gnmt",
            "memory_bytes": gnmt["file_memory_bytes"],
            "devices": devices,
            "bandwidth": gnmt["file_bandwidth_bytes_per_s"],
            "microbatches": gnmt["file_microbatches"],
        }
        for devices in UNANSWERED
    ]
    for run in (*content["runs"], *unanswered):
        wanted = args.input in (None, run["input"]) and (
            not args.devices or run["devices"] in args.devices
        )
        if wanted and (not args.memory or int(run["memory_bytes"]) >> 30 in args.memory):
            rows.append(_row(_Run.of(run), own=args.own))
            print(*rows[-1], sep="  ", flush=True)
    print(
        tabulate(
            rows, OWN_HEADERS if args.own else HEADERS, tablefmt="github", disable_numparse=True
        )
    )


@dataclass(frozen=True)
class _Run:
    """A run of the program, the graph that it read, and the same problem for the planner."""

    run: Mapping[str, Any]
    graph: Mapping[str, Any]
    problem: Problem

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> _Run:
        path = ANCHORS / "piper-inputs" / f"{run['input']}.json"
        profile = load_piper(path)
        # Each end of a transfer and of an all-reduce takes a device twice the bytes' time, and
        # nothing overlaps.
        cluster = flat_cluster(
            run["devices"], run["bandwidth"] / 2, int(run["memory_bytes"]), overlap=False
        )
        rules = StageRules(
            shard_optimizer="never", tensor=(1, *(costs.degree for costs in profile.tensor or ()))
        )
        problem = Problem(
            layer_costs_on(profile, cluster), Setting(cluster, TWO_BW, run["microbatches"]), rules
        )
        return cls(run, json.loads(path.read_text(encoding="utf-8")), problem)

    @property
    def theirs(self) -> list[PiperStage]:
        """The program's plan."""
        return [
            PiperStage(
                frozenset(each["nodes"]), each["dp"], each["tp"], frozenset(each["recomputed"])
            )
            for each in self.run.get("stages", ())
        ]


def _row(run: _Run, *, own: bool) -> list[str]:
    content, problem = run.run, run.problem
    took = f"{content['solve_s']:.2f}" if "solve_s" in content else "no end"
    formulas = Formulas(run.graph, content["bandwidth"], content["microbatches"])
    head = [content["input"], f"{content['memory_bytes'] / 2**30:.3g} GiB", str(content["devices"])]
    head.append(_seconds(content.get("tps")))
    started = time.process_time()
    stages, costs = _own(run) if own else (answered(problem, run.graph), [])
    spent = f"{time.process_time() - started:.2f}"
    if stages is None:
        return [*head, "none", *costs, "", "", took, spent]
    config = short_config(
        config_of(tuple(each.replicas for each in stages), 1, tuple(each.tensor for each in stages))
    )
    memory = f"{formulas.memory_bytes(stages) / content['memory_bytes']:.0%}"
    return [*head, _seconds(formulas.seconds(stages)), *costs, memory, config, took, spent]


def _own(run: _Run) -> tuple[list[PiperStage] | None, list[str]]:
    """Return what the planner answers, and the seconds of both plans by its cost model."""
    problem, microbatches = run.problem, run.problem.microbatches
    profile, cluster, theirs = problem.layer_costs.profile, problem.cluster, run.theirs
    priced = _seconds(_priced(profile, cluster, theirs, microbatches) if theirs else None)
    try:
        plan = solve(
            profile,
            cluster,
            tensor=problem.rules.tensor,
            schedule=TWO_BW,
            microbatches=microbatches,
            shard_optimizer="never",
        )
    except InfeasibleError:
        return None, [priced, "none"]
    assert plan.solver.cost_model_s is not None
    return _stages(plan), [priced, _seconds(plan.solver.cost_model_s / microbatches)]


def _stages(plan: Plan) -> list[PiperStage]:
    return [
        PiperStage(
            frozenset(map(int, stage.layers)),
            stage.replicas,
            stage.tensor,
            frozenset(int(name) for group in stage.recompute_groups for name in group),
        )
        for stage in plan.stages
    ]


def _priced(
    profile: Profile, cluster: Cluster, stages: Sequence[PiperStage], microbatches: int
) -> float:
    """Return the seconds per microbatch of the program's plan by our cost model."""
    costs, before, found = layer_costs_on(profile, cluster), frozenset[int](), list[Candidate]()
    for stage in stages:
        layers = frozenset(costs.position[str(node)] for node in stage.nodes)
        groups = tuple(frozenset((costs.position[str(node)],)) for node in sorted(stage.recomputed))
        found.append(
            Candidate(
                before, layers, StageOptions(stage.replicas, False, groups, tensor=stage.tensor)
            )
        )
        before |= layers
    return (
        price(costs, found, Setting(cluster, TWO_BW, microbatches)).seconds_per_minibatch
        / microbatches
    )


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.5g}"


if __name__ == "__main__":
    main()
