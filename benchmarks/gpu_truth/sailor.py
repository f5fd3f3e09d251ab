"""Sailor's measured iterations on GH200, priced with its own measured layer times: nothing is
estimated.

A device of the cluster is a node of four GPUs, over which every layer is split by tensor
parallelism.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, anchors, price
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value

_FLOAT = 4
_STATE = 2  # Adam's moments, each as large as the weights


def rows() -> Iterator[Row]:
    """Yield all entries."""
    sailor = anchors("sailor.json")
    network = anchors("sailor-network.json")["homogeneous"]["inter"]["GH-96"]
    for entry in sailor["entries"]:
        yield _row(entry, network["4"][1])


def _row(entry: Mapping[str, Any], bandwidth_bytes_per_s: float) -> Row:
    stages = entry["stages"]
    nodes = entry["gpus_used"] // entry["tp"][0]
    priced = price(
        _profile(entry["model"], entry["microbatch"], entry["tp"][0]),
        flat_cluster(nodes, bandwidth_bytes_per_s),
        [OwnStage(blocks=stage["layers"], replicas=stage["dp"]) for stage in stages],
        entry["global_batch"] // entry["microbatch"],
    )
    job = f"{entry['model']}, {entry['gpus_used']} GH200, batch {entry['global_batch']}"
    plan = (
        f"pp {entry['pp']}, dp {entry['dp']}, tp {entry['tp'][0]}, microbatch {entry['microbatch']}"
    )
    # The measured peak is of one GPU, and its parts are not known: memory is not compared.
    predicted = Prediction(priced.predicted.seconds_per_minibatch)
    return Row("sailor", job, plan, entry["measured_iteration_s"], predicted=predicted)


def _profile(model: str, microbatch_size: int, degree: int) -> Profile:
    """Return the profile of a node of `degree` GPUs."""
    times = _times(model, microbatch_size, degree)
    sizes = _by_layer("sailor-layer-sizes.csv", {"model": model, "tp": str(degree)})
    layers, last = [], max(times)
    for number in sorted(times):
        time, size = times[number], sizes[number]
        weights = round(size["params_floats"]) * _FLOAT
        sent = round(size["activation_output_floats"]) * _FLOAT * microbatch_size
        name = f"layers.{number}"
        value = Value(name=name, output_bytes=sent, gradient_bytes=sent)
        layers.append(
            Layer(
                name=name,
                op="layer",
                forward_s=time["forward_s"],
                backward_s=time["backward_s"],
                update_s=time["update_s"],
                outputs=() if number == last else (value,),
                weight_bytes=weights,
                gradient_bytes=weights,
                optimizer_bytes=_STATE * weights,
                saved_bytes=round(size["activation_stored_floats"]) * _FLOAT * microbatch_size,
            )
        )
    edges = [Edge(source=a.name, value=a.name, target=b.name) for a, b in pairwise(layers)]
    return Profile(
        model=model,
        device=Device(kind="cuda", name="GH200"),
        microbatch_size=microbatch_size,
        layers=tuple(layers),
        edges=tuple(edges),
        provenance=Provenance(tool="sailor", source="imported"),
    )


def _times(model: str, microbatch_size: int, degree: int) -> dict[int, dict[str, float]]:
    """Return the layers' times; none is more than it is with twice the samples.

    Some layers were measured slower with one sample than with two, and training runs show nothing
    of that.
    """
    key = {"model": model, "tp": str(degree), "gpu": "GH-96"}
    times = _by_layer("sailor-layer-times.csv", {**key, "microbatch": str(microbatch_size)})
    more = _by_layer("sailor-layer-times.csv", {**key, "microbatch": str(2 * microbatch_size)})
    return {
        number: {name: min(value, more.get(number, found)[name]) for name, value in found.items()}
        for number, found in times.items()
    }


def _by_layer(file_name: str, key: Mapping[str, str]) -> dict[int, dict[str, float]]:
    """Return the numbers of every layer from the records that fit `key`; a record stands for a
    range of layers.
    """
    found: dict[int, dict[str, float]] = {}
    with (ANCHORS / file_name).open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if all(record[name] == value for name, value in key.items()):
                numbers = {name: float(value) for name, value in record.items() if name not in key}
                for layer in range(int(record["first_layer"]), int(record["last_layer"]) + 1):
                    found[layer] = numbers
    return found
