"""Megatron's measured iterations with full and with selective recomputation, on servers of eight
A100.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), table 5.
Eight ranks divide every layer. The selective runs recompute scores, softmax, dropout and context of
the attention alone, and divide by tokens what is whole on every rank otherwise (sequence
parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu_truth.by_layers import (
    Parts,
    divided,
    in_sequence,
    layer_reduces,
    parts_of,
    transformer,
)
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    Prediction,
    Row,
    anchors,
    device,
    half_precision,
    price,
    reducing,
    servers,
    without_overlap,
)
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Layer
from planner.profiler.estimated.devices import DeviceSpec

SERVER = 200e9  # bytes per second: eight links of 200 Gbit/s, as the paper says
_VOCABULARY = 51200
_SIZES = ("layers", "hidden", "heads", "ffn", "seq")
_MIDDLE = ("baddbmm", "softmax", "bmm")  # dropout is within the softmax's layer


def rows() -> Iterator[Row]:
    """Yield all rows."""
    measured = anchors("calculon.json")
    for entry in measured["iteration_seconds"]:
        yield _row(measured["models"][entry["model"]], entry)


def _row(model: Mapping[str, Any], entry: Mapping[str, Any]) -> Row:
    run = entry["execution"]
    job = f"{entry['model']}, {run['num_procs']} A100, batch {run['batch_size']}"
    ways = (
        "all layers recompute"
        if entry["mode"] == "full"
        else "attention recomputes, sequence parallel"
    )
    plan = (
        f"pp {run['pipeline_par']}x{run['pipeline_interleaving']}, tp {run['tensor_par']}, {ways}"
    )
    return Row(
        "calculon",
        job,
        plan,
        entry["measured_s"],
        partial(_predict, model, entry),
        spec=device("a100-80gb"),
    )


def _predict(model: Mapping[str, Any], entry: Mapping[str, Any], spec: DeviceSpec) -> Prediction:
    run, full = entry["execution"], entry["mode"] == "full"
    tp, chunks, micro = run["tensor_par"], run["pipeline_interleaving"], run["microbatch_size"]
    gpt = Gpt("gpt", **{name: model[name] for name in _SIZES}, vocab=_VOCABULARY, dropout=0.1)
    one, rank = (
        parts_of(replace(gpt, tensor=ranks), micro, half_precision(), spec) for ranks in (1, tp)
    )
    rank = rank if full else in_sequence(one, rank, tp)
    whole, part = (
        transformer(gpt.name, each, [_again(each, full)] * gpt.layers) for each in (one, rank)
    )
    profile = divided(whole, {tp: part}, layer_reduces(model["layers"], again=full))
    cluster = reducing(
        servers(run["num_procs"], SERVER), tp, profile.layers[0].outputs[0].output_bytes
    )
    count = run["pipeline_par"] * chunks
    stages = [
        OwnStage(blocks=model["layers"] // count, replicas=run["data_par"], tensor=tp)
    ] * count
    priced = price(
        profile, cluster, stages, run["batch_size"] // micro, chunks if chunks > 1 else None
    )
    return Prediction(without_overlap(priced))


def _again(costs: Parts, full: bool) -> Layer:
    """Return the layer that runs again in its backward, all of it or the middle of its
    attention.
    """
    if full:
        return costs.recomputed(costs.layer)
    again_s = sum(
        layer.forward_s for layer in costs.operators if layer.name.rpartition(".")[2] in _MIDDLE
    )
    return costs.layer.model_copy(update={"backward_s": costs.layer.backward_s + again_s})
