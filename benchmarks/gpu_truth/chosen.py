"""What the planner would choose for the jobs of published runs with tensor parallelism, beside the
best measured run.

python -m benchmarks.gpu_truth.chosen

It has the same model, microbatch, batch and GPUs, 1F1B with a flush, and may choose layers,
replicas, ranks of each stage, what recomputes and who divides the optimizer's state. Both plans are
priced alike; neither was run here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from benchmarks.gpu_truth import aceso, calculon, vtrain
from benchmarks.gpu_truth.aceso_links import Rates
from benchmarks.gpu_truth.by_layers import (
    divided,
    in_sequence,
    layer_reduces,
    parts_of,
    transformer,
)
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    PCIE,
    Row,
    anchors,
    half_precision,
    reducing,
    servers,
    without_overlap,
)
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve

_DEGREES = (1, 2, 4, 8)
_HEADERS = (
    "source",
    "job",
    "best measured run",
    "measured s",
    "priced s",
    "chosen",
    "priced s",
    "the run takes",
)


@dataclass(frozen=True)
class Job:
    """What was to be done in several runs.

    Attributes:
        gpt: the model.
        microbatch_size, microbatches: of the best run.
        cluster: without a limit of memory.
        runs: all that were measured, the fastest first.
        by_tokens: whether groups divide by tokens, too, as the fastest run's did.
    """

    gpt: Gpt
    microbatch_size: int
    microbatches: int
    cluster: Cluster
    runs: Sequence[Row]
    by_tokens: bool = False

    def chosen(self, spec: DeviceSpec, time_limit_s: float) -> Plan:
        """Return the planner's plan."""
        cluster = self.cluster.model_copy(update={"memory_bytes": spec.memory_bytes})
        degrees = [degree for degree in _DEGREES if self.cluster.gpus % degree == 0]
        return solve(
            self._profile(degrees, spec),
            cluster,
            schedule=FLUSH,
            microbatches=self.microbatches,
            tensor=degrees,
            time_limit_s=time_limit_s,
        )

    def _profile(self, degrees: Sequence[int], spec: DeviceSpec) -> Profile:
        run, gpt = half_precision(), self.gpt
        ranks = [
            parts_of(replace(gpt, tensor=degree), self.microbatch_size, run, spec)
            for degree in degrees
        ]
        if self.by_tokens:
            ranks[1:] = [
                in_sequence(ranks[0], rank, t)
                for rank, t in zip(ranks[1:], degrees[1:], strict=True)
            ]
        whole, *parts = (
            transformer(gpt.name, costs, [costs.layer] * gpt.layers) for costs in ranks
        )
        return divided(
            whole,
            dict(zip(degrees[1:], parts, strict=True)),
            layer_reduces(gpt.layers, again=False),
        )


def jobs() -> Iterator[Job]:
    """Yield the jobs with a run whose layers are divided."""
    for record, runs in _fastest(vtrain.records(), vtrain.rows()):
        model = {name: int(record[name]) for name in ("layers", "hidden", "heads", "seq")}
        cluster, size = servers(int(record["gpus"]), vtrain.NODE), int(record["micro_batch"])
        yield _job(model, size, int(record["global_batch"]), cluster, runs)
    for run, runs in _fastest(anchors("mist-aceso-runs.json"), aceso.rows()):
        a100, gpus = run["gpu"].startswith("A100"), run["total_gpus"]
        between = Rates.of("a100").server_bytes_per_s
        cluster = servers(gpus, between) if a100 else flat_cluster(gpus, PCIE)
        yield _job(run["model"], run["micro_batch"], run["global_batch"], cluster, runs)
    measured = anchors("calculon.json")
    for entry, runs in _fastest(measured["iteration_seconds"], calculon.rows()):
        run = entry["execution"]
        cluster, size = servers(run["num_procs"], calculon.SERVER), run["microbatch_size"]
        job = _job(measured["models"][entry["model"]], size, run["batch_size"], cluster, runs)
        yield replace(job, by_tokens=entry["mode"] == "seqsel")


def _fastest(records: Iterable[Any], rows: Iterable[Row]) -> Iterator[tuple[Any, list[Row]]]:
    """Yield the record of each job's fastest run, with all runs, the fastest first."""
    both = sorted(zip(rows, records, strict=True), key=lambda pair: pair[0].measured_s)
    for job in dict.fromkeys((row.source, row.job) for row, _ in both):
        own = [(row, record) for row, record in both if (row.source, row.job) == job]
        if any("tp 1" not in row.plan and ", tp " in row.plan for row, _ in own):
            yield own[0][1], [row for row, _ in own]


def _job(
    model: Mapping[str, Any], size: int, batch: int, cluster: Cluster, runs: Sequence[Row]
) -> Job:
    gpt = Gpt(
        "gpt",
        model["layers"],
        model["hidden"],
        model["heads"],
        4 * model["hidden"],
        51200,
        model["seq"],
        0.1,
    )
    if len(cluster.levels) > 1:
        cluster = reducing(cluster, max(_DEGREES), size * gpt.seq * gpt.hidden * 2)
    return Job(gpt, size, batch // size, cluster, runs)


def rows(time_limit_s: float, sources: Sequence[str]) -> Iterator[list[str]]:
    """Yield a line per job."""
    for job in jobs():
        best = job.runs[0]
        if best.source.split()[0] not in sources:
            continue
        assert best.spec is not None
        # Rows of one job are priced without overlap, where that is how they ran.
        priced = (best if best.predicted is not None else best.now()).predicted
        assert priced is not None
        cells = [
            best.source,
            best.job,
            best.plan,
            f"{best.measured_s:.4g}",
            f"{priced.seconds:.4g}",
        ]
        try:
            plan = job.chosen(best.spec, time_limit_s)
        except PlannerError as error:
            yield [*cells, error.message, "", ""]
            continue
        own_s = (
            plan.predicted.seconds_per_minibatch
            if best.source.startswith("aceso")
            else without_overlap(plan)
        )
        how = short_config(plan.config)
        how += ", sharded" if any(stage.sharded for stage in plan.stages) else ""
        how += ", recomputing" if any(stage.recomputes for stage in plan.stages) else ""
        yield [*cells, how, f"{own_s:.4g}", f"{priced.seconds / own_s - 1:+.0%}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", action="append", help="only these; may be repeated")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="S", help="seconds (default: %(default)s)"
    )
    arguments = parser.parse_args()
    found = rows(arguments.time_limit, arguments.source or ("vtrain", "aceso", "calculon"))
    print(tabulate(list(found), headers=_HEADERS, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
