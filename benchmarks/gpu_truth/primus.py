"""AMD's runs of a Llama 2 of 7 billion parameters, cut to 16 layers, on one server of 8 MI300X: one
pipeline of 8 stages under six schedules.

The source is AMD-AGI/Primus (MIT), which states schedules, throughput and memory, but no batch.
Memory says that a microbatch is one sample of 4,096 tokens. How many there are follows from the
interleaved schedule: with m microbatches, 1F1B waits for (p - 1) / m of its work and two chunks for
half of that, and the measured ratio of 1.09 is met best by 32, the only power of two within 3%.
That ratio is therefore not judged; those of the four other schedules are. "zbb" has the memory of
1F1B, as ZB-H1 has.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_truth.by_layers import parts_of, transformer
from benchmarks.gpu_truth.fused_kernels import megatron
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, device
from planner.analysis import given_plan
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.profiler.estimated.devices import DeviceSpec
from planner.profiler.estimated.execution import Execution
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.controllable_memory import V_HALF, V_MIN
from planner.schedule.one_stage import FLUSH, ZB_H1
from planner.schedule.schedule import Schedule
from planner.schedule.zb_v import ZB_V

MICROBATCHES = 32
_MICROBATCH = 1
# Between two GPUs of a server: one link of Infinity Fabric, 48 of 64 GB/s (AMD, "Understanding RCCL
# Bandwidth and xGMI Performance on AMD Instinct MI300X", 2025).
_BETWEEN = 48e9
_SCHEDULES: dict[str, tuple[Schedule, int]] = {
    "1f1b": (FLUSH, 1),
    "interleaved 1f1b": (INTERLEAVED, 2),
    "zero bubble (zbb)": (ZB_H1, 1),
    "zbv": (ZB_V, 2),
    "v-half": (V_HALF, 2),
    "v-min": (V_MIN, 2),
}

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the dense rows; those of schedules that the planner lacks have no prediction."""
    with (ANCHORS / "primus-schedules.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if not record["experts"]:
                yield _row(record)


def _row(record: Record) -> Row:
    name = record["schedule"]
    gpus = int(record["gpus"])
    tokens = MICROBATCHES * _MICROBATCH * int(record["sequence_length_inferred"])
    seconds = tokens / (float(record["measured_tokens_per_s_per_gpu"]) * gpus)
    job = f"{record['job']}, {gpus} {record['gpu']}"
    if name not in _SCHEDULES:
        return Row("primus", job, name, seconds, needs=(f"schedule {name}",))
    return Row("primus", job, name, seconds, partial(_predict, record), spec=device("mi300x"))


def _predict(record: Record, spec: DeviceSpec) -> Prediction:
    schedule, chunks = _SCHEDULES[record["schedule"]]
    layers, stages = int(record["layers_inferred"]), int(record["pp"]) * chunks
    gpt = Gpt(
        record["model"],
        layers,
        int(record["hidden_size"]),
        int(record["attention_heads"]),
        int(record["ffn_size_dense"]),
        int(record["vocabulary_inferred"]),
        int(record["sequence_length_inferred"]),
        biases=False,
        gated=True,
        flash=True,
    )
    # Primus runs Megatron-LM with fused kernels; its gradients are summed in single precision.
    run = Execution("cuda", megatron, master_weights=True)
    costs = parts_of(gpt, _MICROBATCH, run, spec, "bfloat16")
    profile = transformer(gpt.name, costs, [costs.layer] * layers)
    plan = OwnPlan(
        stages=tuple(OwnStage(blocks=layers // stages) for _ in range(stages)),
        schedule=schedule,
        microbatches=MICROBATCHES,
        chunks=chunks,
    )
    priced = given_plan.price(profile, flat_cluster(int(record["gpus"]), _BETWEEN), plan)
    return Prediction(priced.predicted.seconds_per_minibatch)
