"""Llama 2 7B on four A100 by data, context and pipeline parallelism, as UCI measured them.

The only measured run of context parallelism that was found. Precision, kernels and recomputation
are not stated, and four copies of the optimizer's state would not fit the GPUs in the usual
precisions: so only ratios to data parallelism are compared, without a limit of memory. Links are
those that the source assumes: NVLink for pipelines and gradients, PCIe for keys and values.

    python -m benchmarks.gpu_truth.uci
"""

from __future__ import annotations

import csv
from functools import cache

import planner
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import ANCHORS
from planner.cost.context import with_context
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile

_GPUS = 4
_MICROBATCHES = 128
_LINKS = {"cp": 25e9}  # bytes per second
_NVLINK = 300e9


def measured() -> dict[str, float]:
    """Return the seconds of an iteration, by the axis that divides the work."""
    found = {}
    with (ANCHORS / "uci-4a100.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record["variant"] == "DDP":
                axis = max(("dp", "pp", "cp", "tp"), key=lambda name: int(record[name]))
                found[axis] = float(record["measured_iteration_seconds"])
    return found


def predicted_s(axis: str) -> float:
    """Return the seconds of an iteration by an axis: dp, pp or cp."""
    stages = _GPUS if axis == "pp" else 1
    replicas = {"dp": str(_GPUS), "cp": f"1x{_GPUS}", "pp": "1"}[axis]
    plan = planner.price(
        _profile(),
        flat_cluster(_GPUS, _LINKS.get(axis, _NVLINK)),
        stages,
        replicas=replicas,
        schedule="1f1b-flush",
        microbatches=_MICROBATCHES,
    )
    return plan.predicted.seconds_per_minibatch


@cache
def _profile() -> Profile:
    llama = Gpt(
        "llama2-7b",
        layers=32,
        hidden=4096,
        heads=32,
        ffn=11008,
        vocab=32000,
        seq=4096,
        biases=False,
        gated=True,
        flash=True,
    )
    how = EstimateOptions(device="a100-80gb", dtype="bfloat16", master_weights=True)
    return with_context(estimate_profile(llama.training_spec(), 1, how), (_GPUS,))


def main() -> None:
    """Print ratios to data parallelism."""
    seconds = measured()
    for axis in ("pp", "cp"):
        ratio = seconds[axis] / seconds["dp"]
        ours = predicted_s(axis) / predicted_s("dp")
        error = ours / ratio - 1
        print(f"{axis}: measured {ratio:.2f} times dp, predicted {ours:.2f} ({error:+.1%})")


if __name__ == "__main__":
    main()
