"""AMP's runs of GPT-2 of 345 million parameters by DeepSpeed, on 16 T4, and on 12 V100 and 4 T4, in
servers of four.

Estimated by shapes: weights in half precision, gradients summed in single, nothing recomputed or
sharded. GPUs of a server of T4 do not reach each other directly. Of mixed GPUs, the last server is
the one of T4, and all have the links that AMP states for such servers.

With one sample the host binds: AMP timed 3.9 ms for the forward of a layer on a V100, whose kernels
take 0.9 ms as estimated, and as long for a layer that four ranks divide. The host is taken to need
as long for the backward.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache, partial
from statistics import fmean

from benchmarks.gpu_truth.by_layers import divided, layer_reduces, parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    ANCHORS,
    PCIE,
    Prediction,
    Row,
    device,
    price,
    unfused,
    without_overlap,
)
from planner.formats.cluster import Cluster, DeviceKind, hierarchical_cluster
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.files import replace
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec

_SERVERS, _PER_SERVER = 4, 4
_BLOCKS = 24
_LAUNCHES = 17 + 29  # of a layer's forward and backward, as traced
_P3_INSIDE, _P3_BETWEEN = 170e9 / 8, 10e9 / 8  # bytes per second, as AMP states them
_G4_BETWEEN = 50e9 / 8

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the rows that were measured, on 16 T4."""
    for _, row in recorded_rows():
        yield row


def recorded_rows() -> Iterator[tuple[Record, Row]]:
    """Yield the same rows with what they are made of."""
    for record in _records("homogeneous"):
        yield record, _row("amp", "16 T4", record)


def mixed_rows() -> Iterator[Row]:
    """Yield the rows that were measured, on 12 V100 and 4 T4; none where all are kept elsewhere."""
    for record in _records("het_cluster"):
        yield _row("amp mixed", "12 V100 and 4 T4", record)


def _records(job: str) -> Iterator[Record]:
    with (ANCHORS / "amp-mixed-cluster.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record["job"] == job and record["outcome"] == "ok":
                yield record


def _row(source: str, gpus: str, record: Record) -> Row:
    tp, dp, pp, micro = (record[name] for name in ("tp", "dp", "pp", "micro_batch"))
    return Row(
        source,
        f"GPT-2 345M, {gpus}, batch {record['global_batch']}",
        f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}",
        float(record["measured_iteration_seconds"]),
        partial(predicted if source == "amp" else predicted_on_mixed, record),
        spec=hosted("t4"),
    )


def hosted(name: str) -> DeviceSpec:
    """Return a GPU whose kernels a host launches as slowly as AMP's."""
    return replace(device(name), dispatch_s=host_s())


@cache
def host_s() -> float:
    """Return the seconds of a launch: of the layers that AMP timed on a V100."""
    with (ANCHORS / "amp-layer-times.csv").open(encoding="utf-8") as file:
        forward_s = [
            float(record["forward_seconds_per_sample"])
            for record in csv.DictReader(file)
            if (record["model"], record["gpu_inferred"], record["tp"]) == ("gpt2", "V100", "1")
            and record["layer_kind_inferred"] == "block"
        ]
    return 2 * fmean(forward_s) / _LAUNCHES


def predicted(record: Record, spec: DeviceSpec, share: float = 1.0) -> Prediction:
    """Predict a run on GPUs of one kind, whose servers reach this share of their links' rate."""
    between = share * float(record["inter_server_bits_per_s_assumed_by_authors"]) / 8
    cluster = hierarchical_cluster((_PER_SERVER, _SERVERS), (PCIE, between))
    return _priced(record, _divided_profile(record, spec), cluster)


def predicted_on_mixed(record: Record, t4: DeviceSpec) -> Prediction:
    """Predict a run on three servers of V100 and one of T4."""
    profiles = {
        "v100": _divided_profile(record, hosted("v100")),
        "t4": _divided_profile(record, t4),
    }
    return _priced(record, profile_of_kinds(profiles), mixed_cluster())


def mixed_cluster() -> Cluster:
    """Return three servers of V100, and one of T4, which is slower inside and faster outside."""
    cluster = hierarchical_cluster((_PER_SERVER, _SERVERS), (PCIE, _P3_BETWEEN))
    v100 = DeviceKind(name="v100", count=12, link_ratios=(_P3_INSIDE / PCIE, 1.0))
    t4 = DeviceKind(name="t4", count=4, link_ratios=(1.0, _G4_BETWEEN / _P3_BETWEEN))
    return replace(cluster, kinds=(v100, t4))


def _priced(record: Record, profile: Profile, cluster: Cluster) -> Prediction:
    tp, dp = int(record["tp"]), int(record["dp"])
    stages = [OwnStage(blocks=count, replicas=dp, tensor=tp) for count in _blocks(record)]
    microbatches = int(record["microbatches_per_replica"]) * dp
    return Prediction(without_overlap(price(profile, cluster, stages, microbatches)))


def _divided_profile(record: Record, spec: DeviceSpec) -> Profile:
    """Return the profile with what one of the ranks does that divide layers."""
    tp = int(record["tp"])
    profile = _profile(record, spec)
    if tp == 1:
        return profile
    part = _profile(record, spec, tp)
    return divided(profile, {tp: part}, layer_reduces(_BLOCKS, again=False))


def _blocks(record: Record) -> list[int]:
    return [int(count) for count in record["blocks_per_stage"].split()]


def _profile(record: Record, spec: DeviceSpec, tensor: int = 1) -> Profile:
    gpt = Gpt(
        "gpt",
        _BLOCKS,
        int(record["hidden_size"]),
        int(record["attention_heads"]),
        int(record["ffn_size_inferred"]),
        int(record["vocabulary"]),
        int(record["sequence_length"]),
        dropout=0.1,
        tensor=tensor,
    )
    costs = parts_of(gpt, int(record["micro_batch"]), unfused(), spec)
    return transformer(gpt.name, costs, [costs.layer] * _BLOCKS)
