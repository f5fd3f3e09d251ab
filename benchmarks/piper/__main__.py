"""Answer the questions of Piper's program, and compare with its answers. See README.md in this folder.

python -m benchmarks.piper --input bert32a100 --devices 128
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks.gpu_truth.rows import ANCHORS, anchors
from benchmarks.piper.formulas import Formulas, PiperStage
from planner.cost.candidate import Candidate
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.stage_options import StageOptions
from planner.cost.tensor import layer_costs_on
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.importers import read_profile
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.double_buffered import TWO_BW
from planner.solver import solve

HEADERS = ["graph", "memory", "GPUs", "Piper's s", "ours", "Piper's, by our cost", "ours, by our cost"]
HEADERS += ["memory, by Piper's", "plan", "Piper took s", "we took CPU s"]


def main() -> None:
    """Print a line per run of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="of these graphs only")
    parser.add_argument("--devices", type=int, nargs="+", help="with so many GPUs only")
    parser.add_argument("--memory", type=int, nargs="+", help="of so many GiB only")
    args = parser.parse_args()
    rows = []
    for run in anchors("piper.json")["runs"]:
        wanted = args.input in (None, run["input"]) and (not args.devices or run["devices"] in args.devices)
        if wanted and (not args.memory or run["memory_bytes"] >> 30 in args.memory):
            rows.append(_row(run))
            print(*rows[-1], sep="  ", flush=True)
    print(tabulate(rows, HEADERS, tablefmt="github"))


def _row(run: Mapping[str, Any]) -> list[str]:
    path = ANCHORS / "piper-inputs" / f"{run['input']}.json"
    profile, graph = read_profile(path), json.loads(path.read_text(encoding="utf-8"))
    # Each end of a transfer and of an all-reduce takes a device twice the bytes' time, and nothing overlaps.
    cluster = flat_cluster(run["devices"], run["bandwidth"] / 2, run["memory_bytes"], overlap=False)
    formulas = Formulas(graph, run["bandwidth"], run["microbatches"])
    head = [run["input"], f"{run['memory_bytes'] / 2**30:.3g} GiB", str(run["devices"])]
    theirs = [
        PiperStage(frozenset(each["nodes"]), each["dp"], each["tp"], frozenset(each["recomputed"]))
        for each in run.get("stages", ())
    ]
    started = time.process_time()
    try:
        degrees = (1, *(costs.degree for costs in profile.tensor or ()))
        options = {"schedule": TWO_BW, "microbatches": run["microbatches"], "shard_optimizer": "never"}
        plan = solve(profile, cluster, tensor=degrees, **options)
    except InfeasibleError:
        return [*head, _seconds(run.get("tps")), "none", "", "", "", "", f"{run['solve_s']:.2f}", _since(started)]
    took = _since(started)
    ours = _stages(plan)
    assert plan.solver.cost_model_s is not None
    return [
        *head,
        _seconds(run.get("tps")),
        _seconds(formulas.seconds(ours)),
        _seconds(_priced(profile, cluster, theirs, run["microbatches"]) if theirs else None),
        _seconds(plan.solver.cost_model_s / run["microbatches"]),
        f"{formulas.memory_bytes(ours) / run['memory_bytes']:.0%}",
        f"{plan.config} ({plan.solver.status})",
        f"{run['solve_s']:.2f}",
        took,
    ]


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


def _priced(profile: Profile, cluster: Cluster, stages: Sequence[PiperStage], microbatches: int) -> float:
    """Return the seconds per microbatch of the program's plan by our cost model."""
    costs, before, found = layer_costs_on(profile, cluster), frozenset[int](), list[Candidate]()
    for stage in stages:
        layers = frozenset(costs.position[str(node)] for node in stage.nodes)
        groups = tuple(frozenset((costs.position[str(node)],)) for node in sorted(stage.recomputed))
        found.append(Candidate(before, layers, StageOptions(stage.replicas, False, groups, tensor=stage.tensor)))
        before |= layers
    return price(costs, found, Setting(cluster, TWO_BW, microbatches)).seconds_per_minibatch / microbatches


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.5g}"


def _since(started: float) -> str:
    return f"{time.process_time() - started:.2f}"


if __name__ == "__main__":
    main()
