"""Times of layers that are compiled together: shares of their run, and a sum equal to the whole's
time.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from planner.cli.main import main
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.model.spec import load_model_file
from planner.profiler.measured import profiling as profile
from planner.profiler.measured.compiled import (
    CompiledTimes,
    as_compiled,
    equal_spans,
    saved_as_compiled,
)
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.profiler.step.timing import StepTimes
from planner.solver import search_plan as solve
from tests.executor.models import write_model
from tests.profiler.measured.stages_alone import verify


def test_runs_take_about_equal_time() -> None:
    def starts(seconds: list[float], most: int) -> list[int]:
        spans = equal_spans(seconds, most)
        assert [index for span in spans for index in span] == list(range(len(seconds)))
        return [span.start for span in spans]

    assert starts([1, 1, 1, 1, 1, 1, 1, 1], most=4) == [0, 2, 4, 6]
    assert starts([8, 1, 1, 1, 1, 1, 1, 1, 1], most=2) == [0, 1]
    assert starts([1, 1, 6, 1, 1], most=3) == [0, 2, 3]
    assert starts([1, 2, 3], most=8) == [0, 1, 2]
    assert starts([0.0] * 10, most=4) == [0, 3, 6, 9]
    assert starts([3], most=4) == [0]


def _times(forward: float, backward: float) -> StepTimes:
    return StepTimes([forward] * 3, [backward] * 3, [], [forward / 2] * 3, [backward / 2] * 3)


def test_a_layer_has_its_share_of_its_run_and_the_sum_is_the_whole() -> None:
    layers = [_times(2, 1), _times(6, 3), _times(4, 8)]
    measured = CompiledTimes(
        spans=[range(2), range(2, 3)],
        runs=[_times(4, 3), _times(4, 7)],
        whole=_times(6, 10),
        saved_bytes=[90, 10],
        exchanged_bytes=[10, 10],
    )
    scaled = as_compiled(layers, measured)
    # The first run takes half of the uncompiled forward, the second all of it, together 8; the
    # whole takes 6.
    assert [median(layer.forward_s) for layer in scaled] == pytest.approx([0.75, 2.25, 3])
    assert [median(layer.backward_s) for layer in scaled] == pytest.approx([0.75, 2.25, 7])
    assert [median(layer.forward_thread_s) for layer in scaled] == pytest.approx(
        [0.375, 1.125, 1.5]
    )
    assert saved_as_compiled([10, 20, 0], measured) == [30, 60, 10]


@pytest.mark.parametrize(
    ("runs", "whole", "exchanged", "expected"),
    [
        ((4, 4, 4), 10, (30, 40, 10), (3.25, 3, 3.75)),  # 2 s too much, divided by bytes
        # the whole is slower: nothing was saved at the ends
        ((4, 4, 4), 15, (30, 40, 10), (5, 5, 5)),
        ((2, 6, 2), 8, (0, 0, 0), (1.6, 4.8, 1.6)),  # nothing is exchanged
        # no run loses more than half before all are scaled
        ((1, 9), 5, (99, 1), (5 / 19, 5 - 5 / 19)),
    ],
)
def test_what_runs_exchange_is_not_in_the_whole(
    runs: tuple[float, ...], whole: float, exchanged: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    layers = [_times(1, 1) for _ in runs]
    spans = [range(index, index + 1) for index in range(len(runs))]
    measured = CompiledTimes(
        spans, [_times(run, run) for run in runs], _times(whole, whole), [0] * 3, exchanged
    )
    scaled = as_compiled(layers, measured)
    assert [median(layer.forward_s) for layer in scaled] == pytest.approx(expected, rel=0.02)
    assert sum(median(layer.backward_s) for layer in scaled) == pytest.approx(whole)


def test_devices_without_thread_time() -> None:
    def of_gpu(forward: float, backward: float) -> StepTimes:
        return StepTimes([forward], [backward])

    measured = CompiledTimes([range(1)], [of_gpu(1, 0)], of_gpu(1, 0), [0], [0])
    (layer,) = as_compiled([of_gpu(2, 0)], measured)
    assert (layer.forward_s, layer.backward_s, layer.forward_thread_s) == ([1.0], [0.0], [])


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)
@pytest.mark.parametrize("model", ["convolutional", "blocks"])
def test_compiled_profile_plan_and_stages(model: str, tmp_path: Path) -> None:
    file = load_model_file(write_model(tmp_path, model, "momentum"))
    plain = profile_model(file, 4, ProfilingOptions(seconds=0.1, repeats=3))
    compiled = profile_model(file, 4, ProfilingOptions(seconds=0.1, repeats=3, compile=True))
    assert compiled.graph_hash == plain.graph_hash
    assert compiled.compiled is not None
    assert set(compiled.compiled.runs) <= {layer.name for layer in compiled.layers}
    assert compiled.compiled.runs[0] == compiled.layers[0].name
    whole = compiled.whole_step
    assert whole is not None
    assert sum(layer.forward_s for layer in compiled.layers) == pytest.approx(whole.forward_s)
    assert sum(layer.backward_s for layer in compiled.layers) == pytest.approx(whole.backward_s)
    plan = solve(compiled, flat_cluster(2, 1e12), depth="published")
    assert plan.compiled
    assert all(
        time.measured_s > 0
        for time in verify(file, compiled, [s.layers for s in plan.stages], seconds=0.1)
    )
    torch._dynamo.reset()


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device_type: str) -> None:
        raise InputError(
            f"torch.compile does not work for {device_type} on this machine", hint="install g++"
        )

    monkeypatch.setattr(profile, "check_compiler", refuse)
    file = load_model_file(write_model(tmp_path, "language", "sgd"))
    with pytest.raises(InputError, match="does not work for cpu"):
        profile_model(file, 4, ProfilingOptions(compile=True))


def test_it_cannot_be_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path, "language", "sgd")
    assert main(["profile", str(path), "--estimate", "--compile"]) == 2
    assert "--compile cannot be estimated" in capsys.readouterr().err
