"""Measure one model: is it captured, is its split exact, and how long do layers and stages take?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.stages_alone import verify
from planner.errors import CaptureError
from planner.formats.profile import Profile, save_profile
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.modes import evaluating
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.evaluation import matching_cut
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.profiler.this_machine import keep_freed_pages
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
KEY = (7, 3, 1)


def measure_model(
    name: str, batch_size: int, seconds: float, tiny: bool, save: bool
) -> dict[str, str]:
    """Return the model's row of the table, by column."""
    torch.set_num_threads(1)
    keep_freed_pages()
    file = load_model_file(f"{PROFILES / name / 'model.py'}{':build_tiny' if tiny else ''}")
    row = {"model": name, "samples": str(batch_size)}
    torch.manual_seed(0)
    model = file.build_model()
    started = time.process_time()
    graph = capture_file(file, file.example_batch(batch_size), model)
    row["capture"] = f"{time.process_time() - started:.1f} s"
    row["layers"] = str(len(graph.layers))
    other = batch_size + 1 if graph.batch_size is None else batch_size
    for stages in (3, 7):
        row[f"{stages} stages"] = _exactness(
            file, graph, cut_evenly(graph, stages), file.example_batch(other)
        )
    row["evaluation"] = _evaluation(file, graph, file.example_batch(other))
    del graph, model
    started = time.process_time()
    profile = profile_model(file, batch_size, ProfilingOptions(seconds=seconds))
    row["profiling"] = f"{time.process_time() - started:.0f} s"
    if save and not tiny:
        save_profile(profile, PROFILES / name / "cpu.json")
    row |= _sums(profile)
    times = verify(file, profile, cut_by_time(profile, 4), seconds=seconds)
    worst = max(times, key=lambda stage: abs(stage.error))
    row["worst of 4 stages"] = f"{worst.error:+.1%}"
    return row


def cut_by_time(profile: Profile, stages: int) -> list[list[str]]:
    """Return the stages of consecutive layers that minimise the slowest stage (block partition)."""
    times = [layer.forward_s + layer.backward_s + layer.update_s for layer in profile.layers]
    low, high = max(times), sum(times)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(times, middle)) <= stages else (middle, high)
    names = [layer.name for layer in profile.layers]
    ends = [*_filled(times, high), len(names)][1:]
    starts = [0, *ends[:-1]]
    return [names[start:end] for start, end in zip(starts, ends, strict=True)]


def _filled(times: Sequence[float], most: float) -> list[int]:
    """Return the first layers of the stages when each stage takes all layers that fit in `most`."""
    starts, used = [0], 0.0
    for index, one in enumerate(times):
        if used + one > most:
            starts.append(index)
            used = 0.0
        used += one
    return starts


def _exactness(file: TrainingSpec, graph: LayerGraph, cut: list[list[str]], batch: Batch) -> str:
    """Compare a split training step at another batch size with the unsplit graph and with the
    user's own model.
    """
    whole = run_split(graph, batch, cut_evenly(graph, 1), KEY)
    try:
        assert_same(whole, run_split(graph, batch, cut, KEY))
    except AssertionError as difference:
        return f"differs in {str(difference) or 'the loss'}"
    torch.manual_seed(1)
    split = run_split(graph, batch, cut, None)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    mine = run_model(graph, batch, file.loss)
    try:
        assert_same(mine, split)
    except AssertionError as difference:
        return f"exact; the plain model differs in {str(difference) or 'the loss'}"
    return (
        "exact" if torch.equal(torch.get_rng_state(), state) else "exact, but another random state"
    )


def _evaluation(file: TrainingSpec, training: LayerGraph, batch: Batch) -> str:
    try:
        graph = capture_file(file, batch, training.model, training=False)
        cut = matching_cut(training, cut_evenly(training, 7), graph)
    except CaptureError as refused:
        return refused.message
    with evaluating(graph.model):
        mine = run_model(graph, batch, file.loss)
    split = run_split(graph, batch, [names for names in cut if names], None)
    try:
        assert_same(mine, split)
    except AssertionError as difference:
        return f"differs in {str(difference) or 'the loss'}"
    return "exact"


def _sums(profile: Profile) -> dict[str, str]:
    whole = profile.whole_step
    assert whole is not None
    assert whole.forward_thread_s is not None
    assert whole.backward_thread_s is not None
    summed_s = sum(layer.forward_s + layer.backward_s + layer.update_s for layer in profile.layers)
    threads_s = sum(
        (layer.forward_thread_s or 0.0) + (layer.backward_thread_s or 0.0)
        for layer in profile.layers
    )
    return {
        "sum of layers": f"{summed_s / (whole.forward_s + whole.backward_s + whole.update_s) - 1:+.1%}",
        "on the thread": f"{threads_s / (whole.forward_thread_s + whole.backward_thread_s) - 1:+.1%}",
    }
