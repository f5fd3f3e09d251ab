"""Build the modules of a worker's stages from the plan and the model, and the group of ranks that
divides them.

A worker's own weights have the same initial values however they are made: by the whole constructor,
by the part of it that makes the worker's weights, or from the files that pretrained() names. So
hosts need not agree on a way.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from planner.errors import ModelFileError, PlanError, PlannerError, reason_of
from planner.executor.checkpoint.pretrained import Pretrained
from planner.executor.communication.shared_gradients import separate_copies, use_parameters
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.batch_norm import warn_of_division
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.capture.other_sizes import OtherSizes
from planner.model.deferred_weights import DeferredModel, allocate
from planner.model.generators import seed_generators, seeded
from planner.model.lengths import Length
from planner.model.optimizer_part import TrainedParameter, trained_parameters
from planner.model.options import module_options
from planner.model.python_state import PythonState
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.model.stage.capture_check import can_be_checked, check_captured
from planner.model.stage.chunked_loss import end_within
from planner.model.stage.evaluation import EvaluationStages, build_evaluation
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.model.stage.whole_output import WholeOutput
from planner.model.tensor.division import UNDIVIDED, DividedWeights, division_of, keep_parts
from planner.model.tensor.parallel_plan import tensor_parallel_plan
from planner.plan.blocks import sharded_units
from planner.plan.rank_groups import sample_parts
from planner.plan.same_model import check_same_model
from planner.plan.shared_weights import obstacle, shared_weights
from planner.plan.sums import Sum
from planner.plan.trainable import check_base, check_divided, check_sequences
from planner.profiler.loss_mean.stated import check_stated
from planner.units import counted
from planner.workers.job import Job

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup

_log = logging.getLogger(__name__)

# Of the host's memory that whole models, one per local worker, may take: training on a CPU needs
# the rest, and on a GPU its data and checkpoints do.
_WHOLE_MODELS = 0.5
# parameters of a model that is compared with its captured layers at the start
_MOST_CHECKED = 10**8
_FEW = 2  # samples for that
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def defers(job: Job) -> bool:
    """Return whether a worker is to make only its own stages' weights: as the job says, or where
    memory demands it.
    """
    if job.defer_weights is not None:
        return job.defer_weights
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # from above: with versions
    weights_bytes = sum(stage.memory.weights_bytes for stage in job.plan.stages)
    return local * weights_bytes > _WHOLE_MODELS * host_memory_bytes()


def host_memory_bytes() -> int:
    """Return the memory that the host, or the container, has for all its processes."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # no such control group, or "max"
            found = min(found, int(path.read_text(encoding="utf-8")))
    return found


class _Making:
    """Builds the model of `job`, captures it, and gives the weights of `stages` their initial
    values.
    """

    graph: LayerGraph  # of the captured model
    other_sizes: OtherSizes  # of microbatches, for which the graph may not hold
    evaluation: LayerGraph | None = None  # the same in evaluation mode, if the job evaluates

    def __init__(self, job: Job, stages: Sequence[int], spec: TrainingSpec, kind: str) -> None:
        self.job = job
        self.stages = stages
        self.spec = spec
        self.kind = kind
        self.pretrained = Pretrained.named_by(spec)
        # Whether the weights of other stages are never made; a model in memory is there already.
        self.defers = spec.path is not None and defers(job)

    def make(self) -> None:
        """Make the weights; a model that cannot be built without those of other stages is built
        whole.
        """
        if self.defers:
            try:
                with generators_kept(on_success=False):
                    self._make_own()
            except PlannerError:
                if self.job.defer_weights:
                    raise
                self.defers = False

        if not self.defers:
            self._make_all()

    def _make_all(self) -> None:
        self._seed()
        model = self.spec.build_model()
        names = self._captured(model)
        self._read(model, names)
        self._check_captured()
        bare = next((name for name in names if model.get_parameter(name).is_meta), None)
        if bare is not None:
            raise ModelFileError(
                f"parameter '{bare}' is on the meta device, and has no values",
                hint="build the model in memory, or let pretrained() name the files that have them",
            )

    def _make_own(self) -> None:
        deferred = self._built_from_files()
        if deferred is None:
            self._seed()
            deferred = DeferredModel(self.spec.build_model)

        names = self._captured(deferred.model)
        read = set() if self.pretrained is None else self.pretrained.sources(deferred.model).keys()
        deferred.materialize(names - read)
        self._read(deferred.model, names)
        self._check_captured()

    def _built_from_files(self) -> DeferredModel | None:
        """Return the model without random numbers; None unless files have all that the constructor
        would draw.
        """
        if self.pretrained is None:
            return None
        with generators_kept():
            try:
                deferred = DeferredModel(self.spec.build_model, draw=False)
            # it reads values that it makes, perhaps small ones, which are made where it draws
            except ModelFileError:
                return None

        parameters = {name for name, _ in deferred.model.named_parameters(remove_duplicate=False)}
        all_read = (
            parameters <= self.pretrained.sources(deferred.model).keys()
            and not deferred.draws_buffers
        )
        return deferred if all_read else None

    def _seed(self) -> None:
        # All workers build from the same seed, so replicas of a stage begin with equal weights.
        seed_generators(self.job.seed)

    def _captured(self, model: nn.Module) -> set[str]:
        """Capture the model; return all names of the parameters of this worker's stages."""
        plan = self.job.plan
        spec = self.spec
        assert plan.microbatch_size is not None  # or the plan is not trainable
        options = replace(module_options(plan), device=self.kind)
        with seeded(self.job.seed):
            example = spec.example_batch(plan.microbatch_size)
        graph = self.graph = capture_file(spec, example, model, options=options)
        if graph.hash != plan.graph_hash:
            raise PlanError(
                f"the plan was made for another model than '{spec.origin}': graph "
                f"{plan.graph_hash} in the plan, "
                f"{graph.hash} captured",
                hint="profile and solve again: plan profile, plan solve; where a script of your "
                "own profiles a model "
                "that goes through a set, start it with PYTHONHASHSEED=0",
            )

        constants = {node.name for node in graph.fixed}
        check_same_model(
            plan, [layer.name for layer in graph.layers], graph.edges, constants, sums_of(graph)
        )
        # Now, while the model is in this mode, and before ranks keep parts of its weights only.
        self.other_sizes = OtherSizes(graph, spec.loss, example)
        if self.job.options.evaluate_every is not None:
            self.evaluation = capture_file(spec, example, model, training=False, options=options)
        layers = {name for stage in self.stages for name in plan.stages[stage].layers}
        own = [name for layer in graph.layers if layer.name in layers for name in layer.parameters]
        return set(graph.names_of(own))

    def _check_captured(self) -> None:
        """Compare the captured layers with the model, where the profile did not: an estimate runs
        neither.

        A worker of the first stage does so, on its CPU; where it has not all weights, or many, it
        says that it did not.
        """
        graph = self.graph
        spec = self.spec
        if self.job.plan.capture_checked or 0 not in self.stages:
            return

        problem = None
        if not can_be_checked(graph, "cpu"):
            problem = "no worker has all weights"
        elif sum(parameter.numel() for parameter in graph.model.parameters()) > _MOST_CHECKED:
            problem = "that would take long on a CPU"
        else:
            # Its values on a CPU, whatever the device that the graph was captured for.
            options = replace(graph.options, autocast=None, device="cpu")
            try:
                with generators_kept():
                    batch = spec.example_batch(
                        _FEW if graph.batch_size is None else graph.batch_size
                    )
                    check_captured(spec, replace(graph, options=options), [batch], options)
            except PlannerError:
                raise
            except Exception as cause:  # whatever a model raises that runs on a GPU only
                problem = f"on a CPU the model fails: {reason_of(cause)}"

        if problem is not None:
            _log.warning(
                f"warning: the captured layers are not compared with the model: {problem}; a "
                f"profile that is measured "
                "compares them"
            )

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


def accepts_divided_loss(job: Job) -> bool:
    """Return whether the user takes what parts of a minibatch give for what the whole would."""
    loss = job.plan.loss
    return job.options.accept_divided_loss or (loss is not None and loss.accepted)


def divides_loss(job: Job) -> bool:
    """Return whether the losses of parts of a minibatch must add up to its own, and the user
    accepts no other.
    """
    plan = job.plan
    parts = sample_parts(plan) * plan.microbatches
    return plan.schedule.divides and parts > 1 and not accepts_divided_loss(job)


def sums_of(graph: LayerGraph) -> Iterator[Sum]:
    """Yield the gradients of a model that are sums of those of several layers: of values, then of
    weights.
    """
    names = [layer.name for layer in graph.layers]
    for node in graph.crossing:
        if graph.specs[node].requires_grad:
            positions = sorted(graph.users(node) - {graph.owner[node]})
            yield Sum(node.name, [names[position] for position in positions])

    trained = trained_parameters(graph.model)
    users_of: dict[str, list[str]] = {each.name: [] for each in trained}
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter in users_of:
                users_of[parameter].append(layer.name)

    for parameter, users in users_of.items():
        yield Sum(parameter, users)


def tensor_group(plan: Plan, rank: int) -> "TensorGroup | None":
    """Return the group of ranks that divides a worker's layers or sequences; None where each is
    whole on a rank, or the plan leaves the worker out.
    """
    check_base(plan)
    check_sequences(plan)
    check_divided(plan)
    own = next((stage for stage in plan.stages if rank in stage.ranks), None)
    if own is None or not own.divides_layers:
        return None
    # with DTensor, whose import takes a second
    from planner.model.context.group import SequenceGroup
    from planner.model.tensor.group import TensorGroup

    if plan.divides_sequences:
        return SequenceGroup(own.ranks_per_replica, own.place_of(rank))
    return TensorGroup(own.ranks_per_replica, own.place_of(rank))


# for two stages, the trained weights that both hold
SharedNames = Mapping[tuple[int, int], Collection[str]]


@dataclass(frozen=True)
class Modules:
    """A worker's stages."""

    training: dict[int, StageModule]  # by number
    # the same stages of the evaluation graph, with the same parameters
    evaluation: EvaluationStages | None
    lengths: tuple[Length, ...]  # of batches, that vary
    shared: SharedNames  # of all stages of the plan, on this worker or not
    trained: Sequence[TrainedParameter]  # of the whole model
    parts: Sequence[Sequence[str]]  # the names of those that each stage of the plan trains
    deferred: bool  # whether no other stage's weights were made to build them
    other_sizes: OtherSizes  # whether the captured model holds for other sizes of microbatches
    # what the plan says of the loss, with what the model says against it
    loss: LossMean | None = None
    output: WholeOutput | None = None  # of the model, which the last stage returns with the loss
    state: PythonState | None = None  # of what the user's code reads, where it must stay as it was


def build_modules(
    job: Job,
    stages: Sequence[int],
    spec: TrainingSpec,
    kind: str,
    tensor: "TensorGroup | None" = None,
    read_samples: Callable[[], Sequence[Batch]] = list,
) -> Modules:
    """Build the model for a `kind` of device, capture it, and keep the layers of `stages`, without
    the rest.

    What the plan says of the loss is checked with batches of the training data, which
    `read_samples` returns.

    Raise PlannerError when the plan has no model, when the captured model is not the one that was
    profiled, or when stages share a weight whose copies the schedule cannot keep equal.
    """
    plan = job.plan
    if not plan.trainable or plan.microbatch_size is None:
        raise PlanError(
            f"the plan for '{plan.model}' comes from an imported profile, which holds no model to "
            f"train",
            hint="profile your model file with: plan profile model.py",
        )

    initial = _Making(job, stages, spec, kind)
    initial.make()
    graph = initial.graph
    loss = plan.loss
    if not divides_loss(job):
        loss = None if loss is None else replace(loss, forbidden=())
    elif len(plan.stages) - 1 in stages and not initial.defers:
        loss = check_stated(spec, graph, read_samples(), graph.options, loss)

    shared = _shared(job, graph, spec)
    division = UNDIVIDED
    if tensor is not None:
        division = _division(plan, spec, graph, tensor)
    chunks = loss_chunks(plan, graph)
    alike = Variant(compiled=plan.compiled, division=division, loss_chunks=chunks)
    if os.environ.get("RANK") == "0":
        warn_of_division(graph.model, _parts_of_minibatch(plan))
    compared = _compared_output(job, graph, spec)
    modules = {}
    for number in stages:
        stage = plan.stages[number]
        again = stage.recompute_groups
        units = sharded_units(stage.layers, again) if stage.shards_gradients else ()
        variant = replace(alike, recompute=again, units=tuple(units))
        is_last = number == len(plan.stages) - 1
        kept = compared.names if compared is not None and is_last else ()
        before = [name for earlier in plan.stages[:number] for name in earlier.layers]
        modules[number] = build_stage(graph, stage.layers, kept, variant, before=before)

    separate_copies(list(modules.values()))
    for module in modules.values():
        keep_parts(module)
    evaluated = None
    if initial.evaluation is not None:
        cut = [stage.layers for stage in plan.stages]
        output = spec.defines("metrics")
        divided = modules if plan.stages[0].shards_gradients else None
        division = replace(division, sends_parts=False, by_samples=False)
        evaluated = build_evaluation(
            graph,
            cut,
            initial.evaluation,
            stages,
            output=output,
            division=division,
            of=divided,
            loss_chunks=chunks,
        )
        for number, module in evaluated.modules.items():
            use_parameters(module, modules[number])

    trained = trained_parameters(graph.model)
    return Modules(
        training=modules,
        evaluation=evaluated,
        lengths=graph.lengths,
        shared=shared,
        trained=trained,
        parts=_parts(plan, graph, trained),
        deferred=initial.defers,
        other_sizes=initial.other_sizes,
        loss=loss,
        output=compared,
        state=_state(job, graph, spec),
    )


def _division(
    plan: Plan, spec: TrainingSpec, graph: LayerGraph, tensor: "TensorGroup"
) -> DividedWeights:
    """Return what a group of ranks divides of the captured model: its sequences, or its weights."""
    if plan.divides_sequences:
        from planner.model.context.division import divided_sequences
        from planner.model.context.group import SequenceGroup

        assert isinstance(tensor, SequenceGroup)
        return divided_sequences(graph, tensor)

    samples = 0
    if plan.by_samples:
        assert plan.microbatch_size is not None  # or building the modules had failed
        samples = plan.microbatch_size

    division = division_of(
        graph, tensor_parallel_plan(spec, graph, tensor.degree, samples), tensor, samples
    )
    by_tokens = plan.cluster.sequence_parallel and not plan.by_samples
    division = replace(division, by_tokens=by_tokens, sends_parts=by_tokens and plan.divides_alike)
    if by_tokens and not division.within(graph, ()).tokens:
        raise PlanError(
            f"{tensor.degree} ranks cannot shard the tokens of any value evenly",
            hint="take sequences of a multiple of that, or solve without `sequence_parallel`",
        )

    return division


def loss_chunks(plan: Plan, graph: LayerGraph) -> int:
    """Return in how many chunks of tokens the last stage computes the loss.

    Raises:
        UnchunkedLossError: when the captured model's loss cannot be.
    """
    if plan.chunked_loss is None:
        return 1
    last = [graph.position[name] for name in plan.stages[-1].layers]
    end_within(graph, last)
    return plan.chunked_loss.chunks


def _parts_of_minibatch(plan: Plan) -> int:
    """Return into how many parts a minibatch is divided, each of which the layers see by itself."""
    if not plan.schedule.divides:
        return 1
    return plan.microbatches * sample_parts(plan)


def _state(job: Job, graph: LayerGraph, spec: TrainingSpec) -> PythonState | None:
    """Return what must stay as it was; None where all blocks are on one worker, which calls
    on_update(), too.
    """
    if graph.blocks is None:
        return PythonState(spec, graph.model)
    if job.plan.workers > 1:
        return PythonState(spec, graph.model, attributes=False)
    return None


def _compared_output(job: Job, graph: LayerGraph, spec: TrainingSpec) -> WholeOutput | None:
    """Return the model's output where training compares its loss with that of loss(output,
    target).
    """
    # Ranks that divide layers have parts of outputs, and DistributedDataParallel takes all that a
    # stage returns for what is trained on.
    if spec.loss is None or job.plan.divides_layers or job.baseline is not None:
        return None
    # Its logits never exist whole.
    if job.plan.chunked_loss is not None:
        return None
    return WholeOutput.of(graph)


def _parts(plan: Plan, graph: LayerGraph, trained: Iterable[TrainedParameter]) -> list[list[str]]:
    """Return the names of the parameters that each stage trains."""
    layers = {layer.name: layer for layer in graph.layers}
    names = {each.name for each in trained}
    parts = []
    for stage in plan.stages:
        used = dict.fromkeys(name for layer in stage.layers for name in layers[layer].parameters)
        parts.append([name for name in used if name in names])
    return parts


def _shared(job: Job, graph: LayerGraph, spec: TrainingSpec) -> SharedNames:
    """Return the trained weights that stages share; raise PlanError when their copies would not
    stay equal.
    """
    trained = {
        name for name, parameter in graph.model.named_parameters() if parameter.requires_grad
    }
    layers = [stage.layers for stage in job.plan.stages]
    weights = list(
        shared_weights(
            layers, {each.name: trained.intersection(each.parameters) for each in graph.layers}
        )
    )
    problem = obstacle(job.plan, weights)
    schedule = job.plan.schedule
    options = job.options
    apart = {
        "have learning rates of their own with `late_lr`": options.late_lr,
        "clip their gradients each by its own norm": options.clip_grad_norm is not None,
        "scale float16 losses each by its own factor": job.scales_loss,
        "are at different steps of scheduler() when they update it": schedule.stashes
        and spec.defines("scheduler"),
    }
    if problem is None and weights and schedule.asynchronous and any(apart.values()):
        why = next(why for why, given in apart.items() if given)
        hint = "take a schedule that drains, such as 1f1b-flush"
        problem = weights[0].sentence(f" under {schedule}, whose stages {why}"), hint

    if problem is not None:
        raise PlanError(problem[0], hint=problem[1])
    found: dict[tuple[int, int], set[str]] = {}
    for weight in weights:
        found.setdefault(weight.stages, set()).add(weight.name)
    return found


def check_sizes(
    modules: Iterable[StageModule], sizes: Iterable[int], other: OtherSizes, spec: TrainingSpec
) -> None:
    """Raise ModelFileError for `sizes` of microbatches, at an epoch's end, that the model does not
    take as captured.
    """
    for size in sorted(set(sizes) - {0}):
        problem = None
        if any(size < module.least_batch_size for module in modules):
            problem = "BatchNorm cannot take the variance of it"
        else:
            with generators_kept():
                problem = other.problem(spec.example_batch(size))
        if problem is not None:
            raise ModelFileError(
                f"the last minibatch of an epoch has microbatches of {counted(size, 'sample')}: "
                f"{problem}",
                hint="leave it out with `drop_last`",
            )


def transferred(
    plan: Plan, modules: Mapping[int, StageModule]
) -> dict[tuple[int, int], list[ValueSpec]]:
    """Return, by (source, target) stage, the values that travel to and from the stages in
    `modules`.
    """
    found = {}
    for t in plan.transfers:
        ends = [modules[stage] for stage in (t.source, t.target) if stage in modules]
        specs = {spec.name: spec for end in ends for spec in (*end.received, *end.sent)}
        # Plans of before each stage made what depends on constants alone send that, too.
        values = [
            name for name in t.values if not any(name in end.made_by_all for end in ends)
        ] or t.values
        if ends and (missing := [name for name in values if name not in specs]):
            raise PlanError(
                f"the plan sends value '{missing[0]}' from stage {t.source} to {t.target}, which "
                f"do not exchange it",
                hint="make the plan again with: plan solve",
            )
        if ends:
            off_loss = ends[0].off_loss
            found[t.source, t.target] = [
                replace(specs[name], requires_grad=False) if name in off_loss else specs[name]
                for name in values
            ]

    return found
