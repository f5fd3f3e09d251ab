"""Capture each model of a test once, however many workers and jobs train it.

A graph depends on the model file, the shapes of a batch and the options, and not on the values of
weights: each job has the graph of the first one, with a model and weights of its own. Captures take
longer than most of the jobs. Models that keep state in their graph are captured anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, suppress
from unittest import mock

from torch import Tensor, nn

from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.modes import put_in_training
from planner.model.options import PLAIN, ModuleOptions, module_options
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec, load_model_file
from planner.workers.job import Job

_known: dict[Hashable, LayerGraph] = {}


def each_captured_once() -> AbstractContextManager[object]:
    """Let workers of this process capture each model once."""
    return mock.patch("planner.executor.run.stages.capture_file", _captured)


def capture_ahead(job: Job) -> None:
    """Capture a job's model for workers that are forked from this process afterwards."""
    plan = job.plan
    if plan.microbatch_size is None:
        return
    # Each worker says itself what is wrong with a model.
    with suppress(Exception), generators_kept():
        spec = load_model_file(job.model)
        example = spec.example_batch(plan.microbatch_size)
        options = replace(module_options(plan), device="cpu")
        _captured(spec, example, spec.build_model(), options=options)
        if job.options.evaluate_every is not None:
            _captured(spec, example, spec.build_model(), training=False, options=options)


def _captured(
    spec: TrainingSpec,
    batch: Batch,
    model: nn.Module,
    *,
    training: bool = True,
    options: ModuleOptions = PLAIN,
) -> LayerGraph:
    key = _key(spec, batch, model, training, options)
    graph = _known.get(key)
    if graph is None:
        graph = capture_file(spec, batch, model, training=training, options=options)
        if graph.blocks is None and not _keeps_state(graph):
            _known[key] = graph
        return graph

    if training:
        put_in_training(model)
        options.prepare(model)
    return replace(graph, model=model)


def _keeps_state(graph: LayerGraph) -> bool:
    """Return whether the model writes to constants of its graph, which all jobs would share."""
    read = [node for node in graph.written if node.op == "get_attr"]
    return any(graph.names.buffer(node) is None for node in read)


def _key(
    spec: TrainingSpec, batch: Batch, model: nn.Module, training: bool, options: ModuleOptions
) -> Hashable:
    """Return all that a graph depends on."""
    assert spec.path is not None
    weights = tuple(
        (name, each.shape, each.dtype, each.requires_grad, each.is_meta)
        for name, each in model.named_parameters(remove_duplicate=False)
    )
    modes = tuple((type(module).__name__, module.training) for module in model.modules())
    leaves = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in batch.flatten()[0]
    )
    text = spec.path.read_text(encoding="utf-8")
    return str(spec.path), text, weights, modes, leaves, training, repr(options)
