"""Profiles of a model whose layers are on the device one at a time: bytes are as in the whole
model's profile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.formats.profile import Profile
from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.profiler.measured import part_by_part, profiling, step_measurement
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from tests.executor.models import write_model

SAME = (
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "saved_bytes",
    "outputs",
    "parameters",
)


def _profile(path: Path) -> Profile:
    return profile_model(
        load_model_file(path), 4, ProfilingOptions(device="cpu", seconds=0.0, repeats=3)
    )


def _in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """As if the device had no room for a step."""
    monkeypatch.setattr(profiling, "_may_fit", lambda graph, device: False)
    return _profile(path)


@pytest.mark.parametrize("model", ["convolutional", "language", "blocks", "tied"])
def test_the_bytes_are_those_of_the_whole(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path, model, "adamw")
    whole, parts = _profile(path), _in_parts(path, monkeypatch)
    assert parts.graph_hash == whole.graph_hash
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for name in SAME:
            assert getattr(one, name) == getattr(other, name), (one.name, name)
        assert other.forward_s > 0
        # In a whole step a layer's input may be freed within the layer, or live on after it, and
        # gradients that are equal share memory: each is a value that crosses from layer to layer.
        crossing = max(value.output_bytes for layer in whole.layers for value in layer.outputs)
        assert -crossing <= other.workspace_bytes - one.workspace_bytes <= 2 * crossing, one.name
    assert whole.whole_step is not None
    assert parts.whole_step is not None
    assert parts.whole_step.forward_s > 0
    assert parts.provenance.source == "measured"


def test_a_step_that_does_not_fit_a_cpu_is_measured_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path, "convolutional", "adamw")
    whole = _profile(path)
    monkeypatch.setattr(
        step_measurement, "free_memory_bytes", lambda: sum(x.saved_bytes for x in whole.layers) - 1
    )
    parts = _profile(path)
    assert "does not hold a step: measuring it layer by layer" in caplog.text
    assert [layer.saved_bytes for layer in parts.layers] == [
        layer.saved_bytes for layer in whole.layers
    ]


@pytest.mark.slow
def test_a_part_that_does_not_fit_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path, "convolutional", "adamw")
    whole = _profile(path)
    tried: list[range] = []
    measure = part_by_part._measure_part

    def measured(*args: object) -> object:
        span = args[5]
        assert isinstance(span, range)
        tried.append(span)
        if len(span) > 2:
            raise torch.OutOfMemoryError("too large")
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(part_by_part, "_measure_part", measured)
    monkeypatch.setattr(
        part_by_part, "_parts", lambda graph, most_bytes: [range(len(graph.layers))]
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    parts = _in_parts(path, monkeypatch)
    assert tried[0] == range(len(whole.layers))
    assert [layer.saved_bytes for layer in parts.layers] == [
        layer.saved_bytes for layer in whole.layers
    ]


def test_parts_have_no_more_weights_than_they_may(tmp_path: Path) -> None:
    spec = load_model_file(write_model(tmp_path, "convolutional", "adamw"))
    graph = capture_file(spec, spec.example_batch(2))
    spans = list(part_by_part._parts(graph, 2000))
    assert [index for span in spans for index in span] == list(range(len(graph.layers)))
    assert 1 < len(spans) < len(graph.layers)
