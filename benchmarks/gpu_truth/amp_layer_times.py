"""AMP's runs of a generator of images (TransGAN) on 16 V100, priced with its measured layer times.

Nothing is estimated but what the times do not say. Of ranks that divide a layer, the times have the
all-reduces. A backward takes twice its forward. The weights are 12 h² of a block (Vaswani et al.
2017), with the hidden size of 1,024 of the first blocks. Jiang et al. 2021 ("TransGAN", section
3.2) double each side of the image twice, at a quarter of the hidden size. So the last blocks have
64, and all pass on as many numbers: 8 x 8 x 1,024 for a sample.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import pairwise

from benchmarks.gpu_truth.by_layers import divided
from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, price, without_overlap
from planner.formats.cluster import hierarchical_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value

_HALF, _SINGLE = 2, 4  # bytes
_STATE_BYTES = 12  # of a parameter: the master weight and Adam's moments, in single precision
_HIDDEN = {"block_first_resolution": 1024, "block_last_resolution": 64}
_NUMBERS = 8 * 8 * 1024
_PER_SERVER = 4
_MEMORY_BYTES_PER_S = 0.8 * 900e9  # of a V100, as estimates take it

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the rows that were measured."""
    with (ANCHORS / "amp-mixed-cluster.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record["job"] == "het_model" and record["outcome"] == "ok":
                yield _row(record)


def _row(record: Record) -> Row:
    tp, dp, pp, micro = (record[name] for name in ("tp", "dp", "pp", "micro_batch"))
    return Row(
        "amp v100",
        f"TransGAN, 16 V100, batch {record['global_batch']}",
        f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}",
        float(record["measured_iteration_seconds"]),
        predicted=_predict(record),
    )


def _predict(record: Record) -> Prediction:
    tp, dp = int(record["tp"]), int(record["dp"])
    profile = _profile(1, int(record["micro_batch"]))
    if tp > 1:
        part = _profile(tp, int(record["micro_batch"]))
        nothing = [0] * len(part.layers)
        profile = divided(profile, {tp: part}, (nothing, nothing))
    inside, between = (
        float(record[f"{where}_server_bits_per_s_assumed_by_authors"]) / 8
        for where in ("intra", "inter")
    )
    cluster = hierarchical_cluster(
        (_PER_SERVER, int(record["gpus"]) // _PER_SERVER), (inside, between)
    )
    bounds = [int(bound) for bound in record["stage_boundaries_pipeline_layers"].split()]
    stages = [
        OwnStage(layers=_names(first, last), replicas=dp, tensor=tp)
        for first, last in pairwise([*bounds[:-1], len(profile.layers)])
    ]
    microbatches = int(record["microbatches_per_replica"]) * dp
    return Prediction(without_overlap(price(profile, cluster, stages, microbatches)))


def _names(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"layers.{number}" for number in range(first, last))


def _profile(degree: int, microbatch_size: int) -> Profile:
    """Return the profile of one of so many ranks."""
    layers = [
        _layer(number, record, degree, microbatch_size)
        for number, record in enumerate(_times(degree))
    ]
    layers[-1] = layers[-1].model_copy(update={"outputs": ()})
    edges = [Edge(source=a.name, value=a.name, target=b.name) for a, b in pairwise(layers)]
    return Profile(
        model="transgan",
        device=Device(kind="cuda", name="NVIDIA V100 SXM 16 GB"),
        optimizer_elementwise=True,
        microbatch_size=microbatch_size,
        layers=tuple(layers),
        edges=tuple(edges),
        provenance=Provenance(tool="AMP", source="imported"),
    )


def _layer(number: int, record: Record, degree: int, microbatch_size: int) -> Layer:
    forward_s = microbatch_size * float(record["forward_seconds_per_sample"])
    hidden = _HIDDEN.get(record["layer_kind_inferred"], 0)
    parameters = 12 * hidden**2 // degree
    sent = _HALF * microbatch_size * _NUMBERS
    name = f"layers.{number}"
    return Layer(
        name=name,
        op=record["layer_kind_inferred"],
        forward_s=forward_s,
        backward_s=2 * forward_s,
        # reads the gradient, reads and writes the state, and writes the weight
        update_s=parameters * (_SINGLE + 2 * _STATE_BYTES + _HALF) / _MEMORY_BYTES_PER_S,
        outputs=(Value(name=name, output_bytes=sent, gradient_bytes=sent),),
        weight_bytes=_HALF * parameters,
        gradient_bytes=_SINGLE * parameters,
        optimizer_bytes=_STATE_BYTES * parameters,
    )


def _times(degree: int) -> Sequence[Record]:
    with (ANCHORS / "amp-layer-times.csv").open(encoding="utf-8") as file:
        return [
            record
            for record in csv.DictReader(file)
            if (record["model"], record["tp"]) == ("transgan", str(degree))
        ]
