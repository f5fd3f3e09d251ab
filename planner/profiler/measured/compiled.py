"""Compute the layers' times where torch.compile makes one piece of code of a stage's layers.

Nothing can be marked inside such code. So runs of layers are compiled, each on its own, and marked
at their ends, in steps of the whole model. A layer's time is its share of its run's uncompiled
time, times the time of the compiled run. Layers that gain much from compilation and layers that
gain little are thus told apart as finely as runs are.

The runs take longer than the whole model compiled at once, because what crosses their ends is
written out in the layout that others expect, and read in again. The difference is subtracted from
the runs in proportion to the bytes that they exchange, so that the layers sum to the whole.
Subtracted in proportion to their times instead, stages of ResNet-50 at its large early activations
came out 13% too slow and the others as much too fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import median

from torch import Tensor

from planner.formats.files import replace
from planner.formats.profile import Compiled
from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.lengths import extent_of
from planner.model.stage.graph_stage import made_last
from planner.model.stage.parts import COMPILED, LayerObserver
from planner.model.stage.stage import StageModule, build_stage
from planner.profiler.make_profile import Measurement
from planner.profiler.step.allocation import saved_bytes
from planner.profiler.step.timing import PARTS, Effort, Steps, StepTimes, repeat

RUNS = 8
_LEAST_LEFT = 0.5  # of a run's time, however much it exchanges


@dataclass(frozen=True)
class CompiledTimes:
    """Measurements of runs of layers, each compiled, and of the model compiled at once."""

    spans: Sequence[range]  # layers of each run
    runs: Sequence[StepTimes]
    whole: StepTimes
    saved_bytes: Sequence[int]
    exchanged_bytes: Sequence[int]


def measure_compiled(
    graph: LayerGraph, batch: Batch, plain: Measurement, steps: Steps, effort: Effort
) -> Measurement:
    """Time runs of layers and the whole model, compiled, in turn, and scale the uncompiled layers
    to that.

    The graph's model and the batch are on the device; `plain` was measured uncompiled.
    """
    assert plain.whole is not None
    layers = [layer.times for layer in plain.layers]
    if graph.blocks is not None:
        # any stage compiles blocks one by one
        spans = [range(index, index + 1) for index in range(len(layers))]
    else:
        spans = equal_spans([median(each.forward_s) + median(each.backward_s) for each in layers])

    found = _measure_runs(graph, batch, spans, steps, effort)
    saved = saved_as_compiled([layer.saved_bytes for layer in plain.layers], found)
    return Measurement(
        [
            replace(layer, times=times, saved_bytes=size)
            for layer, times, size in zip(
                plain.layers, as_compiled(layers, found), saved, strict=True
            )
        ],
        found.whole,
        Compiled(
            runs=tuple(graph.layers[span.start].name for span in spans),
            runs_forward_s=sum(median(run.forward_s) for run in found.runs),
            runs_backward_s=sum(median(run.backward_s) for run in found.runs),
            uncompiled_forward_s=median(plain.whole.forward_s),
            uncompiled_backward_s=median(plain.whole.backward_s),
        ),
    )


def _measure_runs(
    graph: LayerGraph, batch: Batch, spans: Sequence[range], steps: Steps, effort: Effort
) -> CompiledTimes:
    names = [layer.name for layer in graph.layers]
    # The weights are there already; a stage's constants are its own.
    device = next(graph.model.parameters()).device

    def compiled(span: range) -> StageModule:
        return build_stage(graph, names[span.start : span.stop], variant=COMPILED).to(device)

    stages = [compiled(span) for span in spans]
    everything = compiled(range(len(names)))

    def forward(observer: LayerObserver) -> Tensor:
        """Return the loss; `observer` is told of the end of each run."""
        known: dict[str, Tensor] = {}
        for index, stage in enumerate(stages):
            received = {spec.name: known[spec.name] for spec in stage.received}
            results = stage(batch if stage.needs_batch else None, received)
            known.update(results)
            observer.after_layer(
                index, made_last([value for name, value in results.items() if name not in received])
            )

        return known[LOSS]

    def measure(whole: StepTimes, runs: Sequence[StepTimes]) -> None:
        steps.whole(lambda: everything(batch, {})[LOSS], whole)
        steps.marked(forward, runs)

    # Fewer bytes than uncompiled: compiled code recomputes some values instead of saving them.
    saved = saved_bytes(stages, forward)
    extent = extent_of(batch, graph.lengths)
    exchanged = [
        sum(spec.size_bytes(extent) for spec in (*stage.received, *stage.sent)) for stage in stages
    ]
    for done in range(effort.warmup):
        effort.progress("compiling", done / effort.warmup)
        measure(StepTimes(), [StepTimes() for _ in spans])

    times = CompiledTimes(spans, [StepTimes() for _ in spans], StepTimes(), saved, exchanged)
    repeat(effort, "measuring compiled", [lambda: measure(times.whole, times.runs)])
    return times


def equal_spans(layer_seconds: Sequence[float], most: int = RUNS) -> list[range]:
    """Return at most `most` runs of layers of about equal time."""
    total = sum(layer_seconds)
    layers = len(layer_seconds)
    if layers <= most or total <= 0:
        starts = list(range(0, layers, -(-layers // most)))
    else:
        starts = _starts_of_equal_time(layer_seconds, most)
    return [range(start, end) for start, end in pairwise([*starts, layers])]


def _starts_of_equal_time(layer_seconds: Sequence[float], most: int) -> list[int]:
    """Return the first layer of each run: a run ends with the layer in whose middle its share of
    the time is reached.
    """
    total = sum(layer_seconds)
    starts = [0]
    done = 0.0
    for index, seconds in enumerate(layer_seconds):
        share_is_reached = done + seconds / 2 > total * len(starts) / most
        if index and len(starts) < most and share_is_reached:
            starts.append(index)
        done += seconds

    return starts


def as_compiled(layers: Sequence[StepTimes], measured: CompiledTimes) -> list[StepTimes]:
    """Scale the times of uncompiled layers to the times that were measured compiled."""
    scaled = [StepTimes(update_s=list(layer.update_s)) for layer in layers]
    for part in PARTS:
        of_part: Callable[[StepTimes], list[float]] = attrgetter(part)
        if not all(map(of_part, (measured.whole, *measured.runs))):
            continue  # no thread time on this device

        whole_s = median(of_part(measured.whole))
        runs_s = [median(of_part(run)) for run in measured.runs]
        within_s = _without_ends(runs_s, whole_s, measured.exchanged_bytes)
        for run_s, span in zip(within_s, measured.spans, strict=True):
            uncompiled_s = sum(median(of_part(layers[index])) for index in span)
            factor = _ratio(run_s, uncompiled_s)
            for index in span:
                times_s = of_part(layers[index])
                of_part(scaled[index]).extend(seconds * factor for seconds in times_s)

    return scaled


def _without_ends(
    runs_s: Sequence[float], whole_s: float, exchanged_bytes: Sequence[int]
) -> list[float]:
    """Return the times of the runs without the cost of what they exchange; they sum to the
    whole's.
    """
    excess_s = sum(runs_s) - whole_s
    exchanged = sum(exchanged_bytes)
    left_s = list(runs_s)
    if excess_s > 0 and exchanged:
        left_s = [
            max(_LEAST_LEFT * seconds, seconds - excess_s * own / exchanged)
            for seconds, own in zip(runs_s, exchanged_bytes, strict=True)
        ]

    to_whole = _ratio(whole_s, sum(left_s))
    return [seconds * to_whole for seconds in left_s]


def saved_as_compiled(layers: Sequence[int], measured: CompiledTimes) -> list[int]:
    """Scale the bytes that uncompiled layers save to what their runs save."""
    scaled = list(layers)
    for run_bytes, span in zip(measured.saved_bytes, measured.spans, strict=True):
        of_layers = sum(layers[index] for index in span)
        if not of_layers:
            # No layer saves anything: what the run saves counts for its first layer.
            scaled[span[0]] = run_bytes
            continue
        for index in span:
            scaled[index] = round(run_bytes * (layers[index] / of_layers))

    return scaled


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0:
        return numerator / denominator
    return 1.0
