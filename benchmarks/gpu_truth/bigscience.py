"""BLOOM's tuning runs: GPT of 18 to 206 billion parameters on 8 to 384 A100, by Megatron-DeepSpeed.

Every layer runs again in its backward, the optimizer's state is sharded over replicas (ZeRO-1), and
nothing overlaps with the all-reduce of gradients. Runs of different software (`era`) are different
jobs.

What the authors ran is in `train/tr11-176B-ml/tr11-176B-ml.slurm` of their repository: Megatron's
default dropout, and CUDA_LAUNCH_BLOCKING=1, without which runs hung. So the host launches a kernel
only when the one before has ended, each kernel takes a launch longer, and a stage computes nothing
while a message is under way.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from benchmarks.gpu_truth.by_layers import divided, layer_reduces, parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    ANCHORS,
    Prediction,
    Row,
    half_precision,
    price,
    reducing,
    servers,
    without_overlap,
)
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DEVICES, HOSTS, DeviceSpec

BY_DATA_SHEET = 50e9  # bytes per second of a server: four ports of Omni-Path at 100 Gbit/s
PER_SERVER = 8
_A100 = DEVICES["a100-80gb"]
SPEC = replace(_A100, launch_s=_A100.launch_s + HOSTS["eager"], dispatch_s=0.0)
_DROPOUT = 0.1
_PORTS = 4
_VOCABULARY, _TOKENS = 250_880, 2048

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the rows that were measured, with links as they were measured."""
    for record in records():
        yield row_of(record, measured_links=True)


def rows_by_data_sheet() -> Iterator[Row]:
    """Yield the same rows with links at the rate of their data sheet."""
    for record in records():
        yield row_of(record, measured_links=False)


def records() -> Iterator[Record]:
    """Yield what the rows are made of, without those that ran out of memory, and one that took as
    long for three quarters of the samples.
    """
    with (ANCHORS / "bigscience-a100.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            suspicious = record["note"].startswith("suspicious")
            if record["outcome"] == "ok" and not suspicious:
                yield record


def row_of(record: Record, *, measured_links: bool) -> Row:
    tp, dp, pp, micro = (record[name] for name in ("tp", "dp", "pp", "micro_batch"))
    heads = record["attention_heads"] or record["attention_heads_inferred"]
    gpus = int(record["gpus"])
    if measured_links:
        source, cluster = "bigscience", measured_cluster(gpus)
    else:
        source, cluster = "bigscience by data sheet", cluster_by_data_sheet(gpus)
    return Row(
        source,
        f"{record['job']}, {record['gpus']} A100, batch {record['global_batch']}",
        f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}, {heads} heads",
        float(record["measured_iteration_seconds"]),
        partial(_predict, record, cluster),
        spec=SPEC,
    )


def one_ring_bytes_per_s() -> float:
    """Return what one all-reduce over all GPUs of four servers reached on a server's links."""
    with (ANCHORS / "bigscience-allreduce.csv").open(encoding="utf-8") as file:
        (measured,) = (row for row in csv.DictReader(file) if row["gpu"] == "A100-80GB")
    return float(measured["bus_bytes_per_s_of_median_inferred"])


def cluster_by_data_sheet(gpus: int, share: float = 1.0) -> Cluster:
    """Return servers of eight A100 whose links reach this share of their data sheet."""
    return servers(gpus, share * BY_DATA_SHEET)


def measured_cluster(gpus: int) -> Cluster:
    """Return servers of eight A100 with four ports each.

    One ring reached the rate of less than one port. Several at once have all ports, each at what
    one ring reached: that many were not measured.
    """
    if gpus == PER_SERVER:
        return cluster_by_data_sheet(gpus)
    one_ring = one_ring_bytes_per_s()
    cluster = servers(gpus, _PORTS * one_ring)
    inner, outer = cluster.levels
    outer = outer.model_copy(update={"one_ring_bandwidth_bytes_per_s": one_ring})
    return cluster.model_copy(update={"levels": (inner, outer)})


def _predict(record: Record, cluster: Cluster, spec: DeviceSpec) -> Prediction:
    return Prediction(seconds_on(record, cluster, spec))


def seconds_on(record: Record, cluster: Cluster, spec: DeviceSpec) -> float:
    """Return the predicted seconds of an iteration on such servers."""
    tp, dp = int(record["tp"]), int(record["dp"])
    profile = _profile(record, spec)
    blocks = [int(count) for count in record["layers_per_stage_inferred"].split()]
    sent_bytes = profile.layers[0].outputs[0].output_bytes
    # Stages are on servers of their own, whose groups of ranks send at once.
    message_s = sent_bytes * (PER_SERVER // tp) / cluster.levels[-1].bandwidth_bytes_per_s
    profile = waiting(profile, blocks, message_s)
    if tp > 1:
        reduces = layer_reduces(sum(blocks), again=True)
        part = waiting(_profile(record, spec, tp), blocks, message_s)
        profile = divided(profile, {tp: part}, reduces)
        cluster = reducing(cluster, tp, sent_bytes)
    profile = without_messages(profile)
    sharded = dp > 1 and record["zero_level"] != "0"
    stages = [OwnStage(blocks=count, replicas=dp, tensor=tp, sharded=sharded) for count in blocks]
    microbatches = int(record["microbatches_per_replica"]) * dp
    return without_overlap(price(profile, cluster, stages, microbatches))


def waiting(profile: Profile, blocks: Sequence[int], message_s: float) -> Profile:
    """Return the profile with stages that wait for their messages.

    DeepSpeed divides what a stage sends over the ranks that divide layers, and gathers it in the
    server of the receiver (`runtime/pipe/engine.py`, `is_pipe_partitioned`): a group of ranks sends
    each value once.

    Args:
        profile: of an embedding, blocks and a head.
        blocks: of each stage.
        message_s: seconds of a message.
    """
    ends = list(accumulate(blocks))[:-1]
    waits = Counter([*ends, *(end + 1 for end in ends)])  # the embedding is before the first block
    layers = [
        layer.model_copy(
            update={
                "forward_s": layer.forward_s + waits[number] * message_s,
                "backward_s": layer.backward_s + waits[number] * message_s,
            }
        )
        for number, layer in enumerate(profile.layers)
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def without_messages(profile: Profile) -> Profile:
    """Return the profile with messages that take no time."""
    nothing = {"output_bytes": 1, "gradient_bytes": 1}
    layers = [
        layer.model_copy(
            update={"outputs": tuple(value.model_copy(update=nothing) for value in layer.outputs)}
        )
        for layer in profile.layers
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def _profile(record: Record, spec: DeviceSpec, tensor: int = 1) -> Profile:
    hidden = int(record["hidden_size"] or record["hidden_size_inferred"])
    blocks = sum(int(count) for count in record["layers_per_stage_inferred"].split())
    gpt = Gpt(
        "gpt",
        blocks,
        hidden,
        int(record["attention_heads"] or record["attention_heads_inferred"]),
        4 * hidden,
        _VOCABULARY,
        _TOKENS,
        dropout=_DROPOUT,
        tensor=tensor,
    )
    costs = parts_of(gpt, int(record["micro_batch"]), half_precision(), spec)
    return transformer(gpt.name, costs, [costs.recomputed(costs.layer)] * blocks)
