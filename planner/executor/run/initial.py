"""Build and capture the model of a job, with initial values for a worker's own weights: all others may have no memory.

The values are the same however they are made: by the whole constructor, by the part of it that makes the worker's
weights, or from the files that pretrained() names. So hosts of different memory need not agree on a way.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from planner.errors import ModelFileError, PlanError, PlannerError
from planner.executor.checkpoint.pretrained import Pretrained
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.deferred_weights import DeferredModel, allocate
from planner.model.options import module_options
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.workers.job import Job

# Of the host's memory that whole models, one per local worker, may take: training on a CPU needs the rest, and on a GPU
# its data and checkpoints do.
_WHOLE_MODELS = 0.5
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class InitialModel:
    """A captured model that has values for a worker's own weights."""

    graph: LayerGraph
    evaluation: LayerGraph | None  # of the same model, if the job evaluates
    deferred: bool  # whether the weights of other stages were never made


def initial_model(job: Job, stages: Sequence[int], spec: TrainingSpec, kind: str) -> InitialModel:
    """Build the model of `job`, capture it, and give the weights of `stages` their initial values.

    Without `defer_weights` in the job, the weights of other stages are made only if the host has room for them. A model
    that cannot be built without them is then built whole.

    Raises:
        PlanError: when the captured model is not the one that was profiled.
        ModelFileError, CaptureError: when the model cannot be built or captured.
        InputError: when the files that pretrained() names are not this model's.
    """
    making = _Making(job, stages, spec, Pretrained.named_by(spec), kind)
    # A model in memory is there already, whole or on the meta device.
    if spec.path is None or not defers(job):
        return making.whole()
    try:
        with generators_kept(on_success=False):
            return making.deferred()
    except PlannerError:
        if job.defer_weights:
            raise
        return making.whole()


def defers(job: Job) -> bool:
    """Return whether a worker is to make only its own stages' weights: as the job says, or where memory demands it."""
    if job.defer_weights is not None:
        return job.defer_weights
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    weights_bytes = sum(stage.memory.weights_bytes for stage in job.plan.stages)  # from above: with versions
    return local * weights_bytes > _WHOLE_MODELS * host_memory_bytes()


def host_memory_bytes() -> int:
    """Return the memory that the host, or the container, has for all its processes."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # no such control group, or "max"
            found = min(found, int(path.read_text(encoding="utf-8")))
    return found


@dataclass(frozen=True)
class _Making:
    job: Job
    stages: Sequence[int]
    spec: TrainingSpec
    pretrained: Pretrained | None
    kind: str  # of the device that trains

    def whole(self) -> InitialModel:
        """Build all weights, then overwrite this worker's by pretrained ones."""
        self._seed()
        model = self.spec.build_model()
        made = self._captured(model, deferred=False)
        names = self._own(made.graph)
        self._read(model, names)
        bare = next((name for name in names if model.get_parameter(name).is_meta), None)
        if bare is not None:
            raise ModelFileError(
                f"parameter '{bare}' is on the meta device, and has no values",
                hint="build the model in memory, or let pretrained() name the files that have them",
            )
        return made

    def deferred(self) -> InitialModel:
        """Build this worker's weights alone."""
        deferred = self._built_from_files()
        if deferred is None:
            self._seed()
            deferred = DeferredModel(self.spec.build_model)
        made = self._captured(deferred.model, deferred=True)
        names = self._own(made.graph)
        read = set() if self.pretrained is None else self.pretrained.sources(deferred.model).keys()
        deferred.materialize(names - read)
        self._read(deferred.model, names)
        return made

    def _built_from_files(self) -> DeferredModel | None:
        """Return the model without random numbers; None unless files have all that the constructor would draw."""
        if self.pretrained is None:
            return None
        with generators_kept():
            try:
                deferred = DeferredModel(self.spec.build_model, draw=False)
            except ModelFileError:  # it reads values that it makes, perhaps small ones, which are made where it draws
                return None
        parameters = {name for name, _ in deferred.model.named_parameters(remove_duplicate=False)}
        all_read = parameters <= self.pretrained.sources(deferred.model).keys() and not deferred.draws_buffers
        return deferred if all_read else None

    def _seed(self) -> None:
        # All workers build from the same seed, so replicas of a stage begin with equal weights.
        torch.manual_seed(self.job.seed)

    def _captured(self, model: nn.Module, *, deferred: bool) -> InitialModel:
        plan, spec = self.job.plan, self.spec
        assert plan.microbatch_size is not None  # or the plan is not trainable
        options, example = replace(module_options(plan), device=self.kind), spec.example_batch(plan.microbatch_size)
        graph = capture_file(spec, example, model, options=options)
        if graph.hash != plan.graph_hash:
            raise PlanError(
                f"the plan was made for another model than '{spec.origin}': graph {plan.graph_hash} in the plan, "
                f"{graph.hash} captured",
                hint="profile and solve again: plan profile, plan solve",
            )
        evaluation = None
        if self.job.options.evaluate_every is not None:
            evaluation = capture_file(spec, example, model, training=False, options=options)
        return InitialModel(graph, evaluation, deferred)

    def _own(self, graph: LayerGraph) -> set[str]:
        """Return all names of the parameters of this worker's stages."""
        layers = {name for stage in self.stages for name in self.job.plan.stages[stage].layers}
        own = [name for layer in graph.layers if layer.name in layers for name in layer.parameters]
        return set(graph.names_of(own))

    def _read(self, model: nn.Module, names: Collection[str]) -> None:
        """Read this worker's pretrained weights, and all buffers, which are small."""
        if self.pretrained is None:
            return
        read = self.pretrained.sources(model)
        allocate(model, [name for name in names if name in read])
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.pretrained.fill(model, {*names, *buffers})
        # The generator would otherwise stand where the way of building left it.
        self._seed()
