"""Price published tuned plans, and let the planner answer the same questions. See README.md in this
folder.

python -m benchmarks.solver_quality
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tabulate import tabulate

from benchmarks.gpu_truth.mist import needs_of, own_stages, profile_of
from benchmarks.gpu_truth.rows import ANCHORS, anchors, device, price
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve

_DEVICES = {"L4-24GB": "l4", "A100-SXM4-40GB": "a100"}
_GIB = 2**30
_FURTHER = "sharded gradients or weights"  # ZeRO-2 and 3, priced as ZeRO-1


def rows(time_limit_s: float) -> Iterator[list[str]]:
    """Yield a line per configuration."""
    for config in anchors("mist.json")["configs"]:
        model, stages = config["model"], config["stages"]
        flash = ", flash" if model["flash_attention"] else ""
        name = f"{model['name']}{flash}, {model['seq']}"
        head = [name, f"{config['gpus']} {_DEVICES[config['gpu']]}", _written(stages)]
        needs = needs_of(stages)
        if set(needs) - {_FURTHER}:
            yield [*head, "", "", "", "", "", f"needs {', '.join(needs)}"]
        else:
            yield head + _judged(config, "priced as ZeRO-1" if needs else "", time_limit_s)


def _judged(config: Mapping[str, Any], note: str, time_limit_s: float) -> list[str]:
    microbatch_size = config["stages"][0]["microbatch"]
    profile = profile_of(config, microbatch_size, device(_DEVICES[config["gpu"]]))
    cluster, microbatches = _cluster(config), config["global_batch"] // microbatch_size
    published = price(profile, cluster, own_stages(config["stages"]), microbatches)
    needed, limit = (
        max(stage.memory.total_bytes for stage in published.stages),
        cluster.memory_bytes,
    )
    assert limit is not None
    cells = [
        f"{published.predicted.seconds_per_minibatch:.4g}",
        f"{needed / _GIB:.1f} of {limit / _GIB:.1f}",
    ]
    measured_s = config["measured_iteration_s"]
    cells.append(
        ""
        if measured_s is None
        else f"{published.predicted.seconds_per_minibatch / measured_s - 1:+.1%}"
    )
    try:
        own = solve(
            profile,
            cluster,
            schedule=FLUSH,
            microbatches=microbatches,
            tensor=sorted({1, *(stage["tp"] for stage in config["stages"])}),
            time_limit_s=time_limit_s,
        )
    except PlannerError as refusal:
        return [*cells, "", "", f"{note + '; ' if note else ''}{refusal.args[0]}"]
    faster = published.predicted.seconds_per_minibatch / own.predicted.seconds_per_minibatch
    return [*cells, _described(own), f"{faster:.2f}x", note]


def _written(stages: list[Mapping[str, Any]]) -> str:
    """Write stages as layers x replicas, with how many recompute."""
    return " ".join(
        f"{stage['layers']}x{stage['dp']}"
        + (f"x{stage['tp']}" if stage["tp"] > 1 else "")
        + (f"r{stage['recomputed_layers']}" if stage["recomputed_layers"] else "")
        for stage in stages
    )


def _described(plan: Plan) -> str:
    def blocks(layers: Iterable[str]) -> int:
        return sum(layer.startswith("layers.") for layer in layers)

    return " ".join(
        f"{blocks(stage.layers)}x{stage.replicas}"
        + (f"x{stage.tensor}" if stage.tensor > 1 else "")
        + (f"r{sum(map(blocks, stage.recompute_groups))}" if stage.recomputes else "")
        + ("s" if stage.sharded else "")
        for stage in plan.stages
    )


def _cluster(config: Mapping[str, Any]) -> Cluster:
    """Return the cluster with the bandwidths that Mist measured for its all-reduces."""
    (found,) = anchors("mist.json")["links"][config["gpu"]]
    each, nodes = config["gpus_per_node"], config["nodes"]
    inside, between = (
        1e9 * found["gpu_gpu"][f"{count}nodes_x_{each}gpus"]["GB_per_s"]
        for count in (1, max(nodes, 2))
    )
    memory_bytes = int(config["memory_capacity_gb"] * _GIB)
    return hierarchical_cluster((each, nodes), (inside, between), memory_bytes)


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--time-limit", type=float, default=20.0, metavar="S", help="of each search (default: 20)"
    )
    arguments = parser.parse_args()
    if not ANCHORS.is_dir():
        raise SystemExit(f"there are no plans: '{ANCHORS}' is no folder")
    headers = [
        "model, tokens",
        "GPUs",
        "published stages",
        "priced s",
        "memory GiB",
        "error of time",
    ]
    headers += ["planner's stages", "faster by", "note"]
    print(
        tabulate(
            rows(arguments.time_limit), headers=headers, tablefmt="pipe", disable_numparse=True
        )
    )


if __name__ == "__main__":
    main()
