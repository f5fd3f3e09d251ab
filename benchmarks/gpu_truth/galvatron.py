"""Galvatron's measured forward of one llama2-7b layer at twelve batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import Row, anchors, parts
from planner.profiler.estimated.estimate import EstimateOptions

_GPT = Gpt("llama2-7b", 32, 4096, 32, 11008, 32000, 2048, biases=False, gated=True, flash=True)
# That it was an A100 is assumed in the README of the anchors.
_OPTIONS = EstimateOptions("a100", "bfloat16", fusion="apex", master_weights=True)


def rows() -> Iterator[Row]:
    """Yield a row per batch size."""
    for record in anchors("galvatron.json")["derived_per_layer"]:
        layer = parts(_GPT, record["batch"], _OPTIONS).layer
        job = f"{_GPT.name} layer, forward, batch {record['batch']}"
        yield Row("galvatron", job, "one layer", record["layer_forward_ms"] / 1e3, layer.forward_s)
