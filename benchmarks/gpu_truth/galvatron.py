"""Galvatron's measured forward of one llama2-7b layer at twelve batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_truth.by_layers import parts_of
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import Prediction, Row, anchors, device, half_precision
from planner.profiler.estimated.devices import DeviceSpec

_GPT = Gpt("llama2-7b", 32, 4096, 32, 11008, 32000, 2048, biases=False, gated=True, flash=True)


def rows() -> Iterator[Row]:
    """Yield a row per batch size."""
    for record in anchors("galvatron.json")["derived_per_layer"]:
        job = f"{_GPT.name} layer, forward, batch {record['batch']}"
        predict = partial(_forward, record["batch"])
        # That it was an A100 is assumed in the README of the anchors.
        measured_s = record["layer_forward_ms"] / 1e3
        yield Row("galvatron", job, "one layer", measured_s, predict, spec=device("a100"))


def _forward(batch: int, spec: DeviceSpec) -> Prediction:
    return Prediction(parts_of(_GPT, batch, half_precision(), spec, "bfloat16").layer.forward_s)
