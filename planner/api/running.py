"""The verbs that run PyTorch, as functions: `planner.profile`, `planner.fit`, `planner.train` and
others.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planner.analysis.slow_links import leaving_time, with_slow_links
from planner.api.as_trained import as_trained
from planner.api.mixed_servers import MixedServers, counted_gpus
from planner.api.servers import Servers, count_gpus, too_fast_words
from planner.api.trainer_run import (
    GivenRun,
    TrainerQuestion,
    answer_trainer,
    given_run,
    says_length,
)
from planner.catalog.models import find_model
from planner.cost.context import has_attention, with_context
from planner.errors import InputError, PlanError
from planner.executor.checkpoint.folders import seed_of_run
from planner.executor.handed_model import packed_model
from planner.executor.run.agreement import check_loss, device_kind
from planner.executor.worker import launch
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import planned_bytes
from planner.formats.files import check_writable, replace
from planner.formats.fit import Fit, TrainingRun
from planner.formats.late import LateFailure, log_failures, noting
from planner.formats.names import EightBits
from planner.formats.plan import Plan, save_plan
from planner.formats.profile import Profile, replace_profile
from planner.formats.timeline import Timeline
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.kinds import checked_counts
from planner.options.option import keywords_of, part_of, refuse
from planner.options.profiling import EstimateArguments
from planner.options.training import (
    CheckpointOptions,
    DriftOptions,
    ElasticOptions,
    RunOptions,
    TrainArguments,
    TrainingOptions,
)
from planner.options.verbs import SAMPLES, TENSOR, TOKENS, FitOptions
from planner.plan.lengths import mean_tokens
from planner.plan.trainable import check_base, check_trainable
from planner.profiler.estimated.devices import (
    DeviceSpec,
    DType,
    check_kind,
    device_spec,
    known_as,
    parse_dtype,
    parse_precision,
    usual_dtype,
    with_eight_bits,
)
from planner.profiler.estimated.estimate import (
    EstimateOptions,
    Estimator,
    estimate_profile,
    load_device,
)
from planner.profiler.estimated.execution import compiler
from planner.profiler.estimated.quantized import BITS, with_quantized_base
from planner.profiler.estimated.stacks import COMPILED, Stack, find_stack
from planner.profiler.estimated.trace import collecting
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.reporting.trace import save_trace
from planner.schedule.registry import SCHEDULES, file_of
from planner.solver.clock import Clock
from planner.solver.fit import FitRequest
from planner.solver.fit import fit as answer_fit
from planner.solver.request import Request
from planner.solver.sizes.microbatches import Profiles
from planner.solver.sizes.minibatch import HALVES, minibatch_for
from planner.solver.tuning.record import STANDARD
from planner.stages.context import usual_context
from planner.workers.job import LAUNCHER_VARIABLE, Job, TrainResult

_log = logging.getLogger(__name__)
SELDOM = 100_000  # allocations of a question, after which garbage is collected
SEARCHING = 0.7  # share of the time for a search, before a trainer's run is priced


_FEW_BLOCKS = (
    "only a few of the model's equal blocks were read, to answer in time, so `plan train` does not "
    "take this plan; with `time_limit_s=none` all are read"
)


@keywords_of(ProfilingOptions)
def profile(model: str | Path | TrainingSpec, options: ProfilingOptions) -> Profile:
    """Measure what each layer of a model costs in training on this device.

    Args:
        model: "model.py", or "model.py:builder" for another function than build_model; or what
            `in_memory` gives.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: when there is no such device, or a number makes no sense.

    Example:
        >>> measured = planner.profile("model.py", batch_size=16, seconds=1)
        >>> measured.layers[0].op
        'Linear'
    """
    options.check_degrees()
    spec = model if isinstance(model, TrainingSpec) else load_model_file(model)
    measured = profile_model(spec, options.batch_size, options, options.progress)
    return _with_context(measured, options.context)


def _with_context(profile: Profile, context: Sequence[int]) -> Profile:
    """Return the profile, with layers whose sequences are divided where ranks for that are
    named.
    """
    if max(context, default=1) == 1:
        return profile
    return with_context(profile, context)


@keywords_of(EstimateArguments)
def estimate(model: str | Path | TrainingSpec, asked: EstimateArguments) -> Profile:
    """Estimate what each layer of a model costs in training on a device that need not be there.

    Args:
        model: "model.py", or "model.py:builder" for another function than build_model; or what
            `in_memory` gives, whose model may be on the meta device.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: for a device or data type that is not in the table.

    Example:
        >>> planner.estimate("model.py", batch_size=16, device="a100-80gb").device.name
        'NVIDIA A100 SXM 80 GB'
    """
    if (asked.device is None) == (asked.device_file is None):
        raise InputError("an estimate is for one device", hint="give `device` or `device_file`")
    if asked.compile and asked.stack is not None:
        raise InputError(
            f"`compile` and `stack={asked.stack}` both say what is fused",
            hint="leave out one of them",
        )

    asked.check_degrees()
    spec = model if isinstance(model, TrainingSpec) else load_model_file(model)
    dtype = parse_dtype(asked.dtype)
    options = EstimateOptions(
        device=asked.device or load_device(asked.device_file or "", dtype),
        dtype=dtype,
        memory_format=asked.memory_format,
        fusion=compiler if asked.compile else None,
        master_weights=asked.master_weights,
        host=asked.host,
        tensor=asked.tensor,
        precision=parse_precision(asked.precision) if asked.precision else None,
        stack=find_stack(asked.stack) if asked.stack else None,
    )
    return _with_context(estimate_profile(spec, asked.batch_size, options), asked.context)


_UNSAID = FitOptions()  # callers give keywords in its place


@keywords_of(FitOptions)
@collecting(SELDOM)
def fit(model: str | Path, gpus: int | None = None, options: FitOptions = _UNSAID) -> Fit:
    """Say whether a model fits GPUs, how to split it, how fast it would train, and how few GPUs
    would do.

    All numbers are estimates. profile.json and plan.json are left in the folder that the answer
    names, and the model.py of a model that was given by its name.

    Args:
        model: llama-7b, gpt2-xl, ...; a class of transformers; its config.json; or a model file.
        gpus: how many there are; None where `gpu` says how many of each kind.

    Raises:
        ModelFileError, CaptureError: when the model cannot be used.
        InputError: for a kind of GPU that is not in the table.
        ClusterError: for servers or links that contradict each other.

    Example:
        >>> planner.fit("model.py", 2, gpu="l4", batch_size=8).asked.plan.workers
        2
    """
    clock = _clock_of(options)
    options = _with_known_names(options)
    gpus, options = count_gpus(gpus, options)
    if isinstance(options.gpu, Mapping) and len(options.gpu) == 1:
        gpus = counted_gpus(options.gpu, gpus)
        options = options.of_one_kind(*options.gpu)

    trained = given_run(options, gpus, model)
    if trained is not None:
        if options.context:
            ranks = ",".join(map(str, options.context))
            raise InputError(
                f"a trainer's run has no price with `context={ranks}`",
                hint="leave `context` out, or ask without the run",
            )
        gpus = trained.run.gpus
        options = trained.wanted(options)

    device, dtype = _devices(options)  # before anything is written
    servers = _servers(gpus, options)
    _check_bits(options)
    _check_states(options)
    _check_price(options)
    file = _model_file(model, options)
    for name in ("profile.json", "plan.json"):
        check_writable(file.folder / name)

    degrees = _degrees(options, servers)
    if trained is not None:
        degrees = sorted({*degrees, trained.run.tensor})
    how = EstimateOptions(
        device,
        dtype,
        master_weights=not options.autocast and dtype in HALVES,
        tensor=degrees,
        where_divided=not options.tensor,
        precision=_precision(options, device),
        stack=_stack(options, device, file),
        experts=_expert_degrees(options, servers),
        spares_blocks=file.named and options.lora is None and options.time_limit_s is not None,
    )
    request = _fit_request(file, how, servers, options, clock)
    clock = _with_time_to_search(clock, options)
    request = request.with_clock(clock)
    sooner = leaving_time(request.about(request.profiles.smallest, clock))
    searching = sooner.clock if trained is None else sooner.clock.part(SEARCHING)
    asked = request.with_clock(searching)
    if trained is not None:  # whose better run is in the same words, without context
        asked = replace(asked, only_asked=True, context=())
    answer, profile = answer_fit(asked)
    answer = _with_slow_links(answer, request.about(profile, clock))
    answer = _as_trained(answer)
    if file.named and not profile.trainable:
        answer = _noting(answer, _FEW_BLOCKS)
    if isinstance(servers, Servers) and not servers.joined_alike:
        answer = _noting(answer, too_fast_words(str(options.gpu), servers.rates[0]))
    if trained is not None:
        answer = _beside_trainer(answer, request, trained)
    return _saved(answer, profile, file)


def _as_trained(answer: Fit) -> Fit:
    """Return the answer with its plan as `train` runs it."""
    plan = answer.asked.plan
    if plan is None:
        return answer
    return replace(answer, asked=replace(answer.asked, plan=as_trained(plan)))


def _noting(answer: Fit, sentence: str) -> Fit:
    """Return the answer with a note on its plan, if it has one and there is something to say."""
    plan = answer.asked.plan
    if plan is None or not sentence:
        return answer
    return replace(answer, asked=replace(answer.asked, plan=plan.noting(sentence)))


def _clock_of(options: FitOptions) -> Clock:
    """Return the clock of all searches, which leave some of the time to other work on the machine,
    and some to what comes after them.
    """
    tuning = STANDARD.fit
    limit_s = options.time_limit_s
    if limit_s is not None:
        limit_s *= 1 - tuning.ending_share
    return Clock.of(limit_s, options.progress, computing_share=tuning.computing_share)


def _with_time_to_search(clock: Clock, options: FitOptions) -> Clock:
    """Return the clock, with time for a search where reading and estimating the model left too
    little: so much processor time, and a few times that on a machine with other work.
    """
    left_s = clock.left_s
    limit_s = options.time_limit_s
    if left_s is None or limit_s is None or clock.stop.is_set():
        return clock
    least_s = STANDARD.fit.least_search_share * limit_s
    if left_s >= least_s:
        return clock
    slower = STANDARD.clock.max_wall_per_cpu_second
    return Clock.of(slower * least_s, options.progress, computing_share=1 / slower)


def _beside_trainer(answer: Fit, request: FitRequest, given: GivenRun) -> Fit:
    """Return the answer with the price of a run in a trainer's words, and a better one."""
    question = TrainerQuestion(
        given,
        request.cluster_of(request.gpus),
        request.profiles.divided_at,
        request.clock,
    )
    return replace(answer, trainer_run=answer_trainer(question, answer.asked.plan))


def _check_bits(options: FitOptions) -> None:
    """Raise InputError where a base is to have few bits, and no adapters are trained beside it, or
    where nobody knows what other bits than 4 cost.
    """
    if options.bits not in (None, BITS):
        raise InputError(f"`bits={options.bits}` is not estimated", hint=f"give `bits={BITS}`")
    if options.bits is not None and options.lora is None:
        raise InputError(
            f"`bits={options.bits}` is for frozen weights, and nothing is frozen",
            hint="give the rank of adapters that are trained in their place: `lora=16`",
        )

    if options.bits is not None and not isinstance(options.gpu, str):
        raise InputError(
            f"`bits={options.bits}` is not estimated for several kinds of GPUs",
            hint="ask about one kind, or leave out `bits`",
        )


def _check_states(options: FitOptions) -> None:
    """Raise InputError for states in 8 bits that ranks divide, or that a CPU steps."""
    if options.optimizer_states != "int8":
        return
    if max(options.tensor, default=1) > 1:
        ranks = ",".join(map(str, options.tensor))
        raise InputError(
            f"`optimizer_states=int8` keeps a scale for 256 elements of a whole weight, of which "
            f"each rank of `tensor={ranks}` has a part",
            hint="leave out `tensor`, or give `optimizer_states=bfloat16`",
        )

    if options.offload is not None:
        raise InputError(
            "`optimizer_states=int8` is for GPUs: the CPU optimizers of `offload=optimizer` have "
            "none in 8 bits",
            hint="leave out one of both",
        )


def _precision(
    options: FitOptions, device: DeviceSpec | Mapping[str, DeviceSpec]
) -> EightBits | None:
    """Return the format of products in 8 bits; raise InputError where a GPU has none, or weights
    are not in half precision with masters.
    """
    if options.precision is None:
        return None
    precision = parse_precision(options.precision)
    for spec in device.values() if isinstance(device, Mapping) else [device]:
        with_eight_bits(spec, precision)
    if options.autocast or options.bits is not None:
        other = "autocast" if options.autocast else "bits"
        raise InputError(
            f"`precision={precision}` is for weights in half precision with masters, and `{other}` "
            f"keeps others",
            hint=f"leave out `{other}`, or `precision`",
        )

    return precision


def _stack(
    options: FitOptions, device: DeviceSpec | Mapping[str, DeviceSpec], file: "_ModelFile"
) -> Stack | None:
    """Return what runs the operators: people compile transformers, and a model file is traced as it
    is.
    """
    if options.stack is not None:
        return find_stack(options.stack)
    specs = device.values() if isinstance(device, Mapping) else [device]
    if file.named and all(spec.is_gpu for spec in specs):
        return COMPILED
    return None


def _check_price(options: FitOptions) -> None:
    """Raise InputError for the price of a training whose length nobody says."""
    dollars = options.dollars_per_gpu_hour
    if dollars is not None and options.train_tokens is None:
        raise InputError(
            f"`dollars_per_gpu_hour={dollars:g}` is no price of a training whose length is unknown",
            hint="give `train_tokens`, as in `train_tokens=15T`",
        )


def _with_known_names(options: FitOptions) -> FitOptions:
    """Return the options with the table's names of GPUs: "rtx-4090" for "RTX4090"."""
    if isinstance(options.gpu, str):
        return replace(options, gpu=known_as(options.gpu))

    counts: dict[str, int] = {}
    for name, count in options.gpu.items():
        known = known_as(name)
        if known in counts:
            raise InputError(f"`gpu` names {known} twice", hint="give each kind once")
        counts[known] = count

    rates = options.bandwidth
    if isinstance(rates, Mapping):
        rates = {known_as(name): each for name, each in rates.items()}
    return replace(options, gpu=counts, bandwidth=rates)


def _devices(options: FitOptions) -> tuple[DeviceSpec | dict[str, DeviceSpec], DType]:
    """Return the kind of GPU, or each of several by name, and the type to train in: one that all
    kinds have.
    """
    names = [options.gpu] if isinstance(options.gpu, str) else list(checked_counts(options.gpu))
    for name in names:
        check_kind(name, alone=len(names) == 1)
    dtype = parse_dtype(options.dtype or usual_dtype(*names))
    specs = {name: device_spec(name, dtype) for name in names}
    return (specs[names[0]] if len(names) == 1 else specs), dtype


def _servers(gpus: int | None, options: FitOptions) -> Servers | MixedServers:
    if isinstance(options.gpu, Mapping):
        return MixedServers.of(options.gpu, gpus, options)
    if gpus is None:
        raise InputError(
            "the number of GPUs is missing",
            hint="give `servers=2` and `gpus_per_server=4`, `gpus=8`, or `gpu=v100=12,t4=4`",
        )
    return Servers.of(gpus, options)


def _degrees(options: FitOptions, servers: Servers | MixedServers) -> Sequence[int]:
    """Return the numbers of ranks that may divide layers: those given, or those inside a server, of
    one kind of GPU.
    """
    if options.bits is not None:
        return ()  # no library divides layers whose weights have 4 bits
    if options.optimizer_states == "int8":
        return ()  # blocks of moments that share a scale would be on several ranks
    if options.tensor:
        return options.tensor
    size = servers.per_server
    if isinstance(servers, MixedServers):
        size = math.gcd(size, *servers.counts.values())
    return [degree for degree in TENSOR if size % degree == 0]


def _expert_degrees(options: FitOptions, servers: Servers | MixedServers) -> Sequence[int]:
    """Return the numbers of ranks that may divide experts: the GPUs of one, two and four servers,
    each of which is estimated with as many experts as its ranks have.
    """
    whole = options.bits is not None or options.optimizer_states == "int8"
    if whole or options.tensor or isinstance(servers, MixedServers):
        return ()
    inside = max((degree for degree in TENSOR if servers.per_server % degree == 0), default=0)
    across = [
        servers.per_server * times
        for times in (2, 4)
        if servers.gpus % (servers.per_server * times) == 0
    ]
    return [degree for degree in (inside, *across) if degree > 1]


def _with_slow_links(answer: Fit, request: Request) -> Fit:
    if answer.asked.plan is None:
        return answer
    plan = with_slow_links(answer.asked.plan, request)
    return replace(answer, asked=replace(answer.asked, plan=plan))


def _fit_request(
    file: "_ModelFile",
    how: EstimateOptions,
    servers: Servers | MixedServers,
    options: FitOptions,
    clock: Clock,
) -> FitRequest:
    """Estimate the model at its first size of microbatches, and return what is to be solved for."""
    estimator = Estimator(file.load(), how)
    estimate = estimator.profile
    if options.bits is not None:
        assert isinstance(how.device, DeviceSpec), "bits are refused for several kinds"
        estimate = partial(_estimate_quantized, estimator, how.device)

    first = estimate(options.batch_size or _first_size(options, file.tokens))
    minibatch = minibatch_for(options, options.tokens, first, servers.gpus)
    memory = options.memory
    # Each of several kinds has its own.
    if memory is None and not first.kinds:
        memory = planned_bytes(first.device)

    profiles = Profiles(
        estimate,
        estimator.divided,
        _sizes(options, first, minibatch, servers.gpus),
        max((*how.tensor, *how.experts), default=1),
        known={first.microbatch_size or 1: first},
    )
    return FitRequest(
        profiles,
        servers.gpus,
        partial(
            _cluster_of,
            servers,
            memory,
            sequence_parallel=how.stack is not None and how.stack.sequence_parallel,
        ),
        options.with_minibatch(minibatch),
        clock,
        run=_run_of(options, first),
        alone=servers.each_alone(memory) if isinstance(servers, MixedServers) else (),
        context=_contexts(options, first, servers),
        whole_sequences=not options.context or 1 in options.context,
    )


def _cluster_of(
    servers: Servers | MixedServers,
    memory: int | str | None,
    gpus: int,
    *,
    sequence_parallel: bool,
) -> Cluster:
    cluster = servers.cluster_of(gpus, memory=memory)
    return replace(cluster, sequence_parallel=sequence_parallel)


def _contexts(
    options: FitOptions, profile: Profile, servers: Servers | MixedServers
) -> Sequence[int]:
    """Return the numbers of ranks that may divide sequences beside 1: those given, or where samples
    are long the usual ones inside a server.
    """
    asked = tuple(ranks for ranks in options.context if ranks > 1)
    if isinstance(servers, MixedServers) or options.bits is not None:
        if asked:
            ranks = ",".join(map(str, options.context))
            raise InputError(
                f"`context={ranks}` is not priced for GPUs of several kinds, nor for a base in few "
                f"bits",
                hint="leave `context` out",
            )
        return ()

    if options.context:
        return asked
    if not options.order.divides or not has_attention(profile):
        return ()
    return usual_context(mean_tokens(profile), servers.per_server)


def _run_of(options: FitOptions, profile: Profile) -> TrainingRun | None:
    """Return the training that is to be paid; raise InputError where it has no tokens."""
    tokens = options.train_tokens
    if tokens is None:
        return None
    if mean_tokens(profile) is None:
        raise InputError(
            f"'{profile.model}' reads no tokens, so `train_tokens={tokens}` is no length of a "
            f"training",
            hint="leave it out, and divide the samples of the training by the samples/s of the "
            "answer",
        )

    return TrainingRun(tokens=tokens, dollars_per_gpu_hour=options.dollars_per_gpu_hour)


def _estimate_quantized(estimator: Estimator, spec: DeviceSpec, batch_size: int) -> Profile:
    return with_quantized_base(estimator.profile(batch_size), spec)


@dataclass(frozen=True)
class _ModelFile:
    """A model file, where profile.json and plan.json go, and the tokens of a sample where the file
    was written here.
    """

    path: Path
    folder: Path
    tokens: int | None = None
    name: str = ""  # of the model, where it was given by that

    @property
    def named(self) -> bool:
        return bool(self.name)

    def load(self) -> TrainingSpec:
        """Read the file; a model keeps its name in whatever folder it is."""
        spec = load_model_file(self.path)
        return replace(spec, name=self.name) if self.named else spec


def _model_file(model: str | Path, options: FitOptions) -> _ModelFile:
    """Return the model file; write one for a model that was given by its name."""
    path = Path(model)
    place = None if options.place is None else Path(options.place)
    if says_length(model):
        if options.length is not None:
            raise InputError(
                f"'{model}' says itself how long its samples are, so `length={options.length}` "
                f"has no meaning",
                hint="change its example_batch(), or leave out `length`",
            )
        if options.lora is not None:
            raise InputError(
                f"'{model}' says itself what is trained, so `lora={options.lora}` has no meaning",
                hint="let its build_model() return the model with adapters, or leave out `lora`",
            )
        if options.optimizer_states != "float32":
            raise InputError(
                f"'{model}' says itself what optimizer trains it, so "
                f"`optimizer_states={options.optimizer_states}` has no meaning",
                hint="let its optimizer() return one with such states, or leave "
                "`optimizer_states` out",
            )
        return _ModelFile(path, place or path.parent)

    named = find_model(str(model))
    tokens = named.tokens(options.length)
    name = _folder_name(named.name, options)
    folder = place or Path(name)
    written = named.write(folder, tokens, options.lora, options.optimizer_states)
    return _ModelFile(written, folder, tokens, name)


def _folder_name(model: str, options: FitOptions) -> str:
    """Return the name of the folder of a model, which says whether adapters are trained, and which
    states the optimizer has.
    """
    states = ""
    if options.optimizer_states != "float32":
        states = f"-states-in-{options.optimizer_states}"
    if options.lora is None:
        return model + states
    bits = "" if options.bits is None else f"-{options.bits}-bits"
    return f"{model}-lora-{options.lora}{bits}{states}"


def _first_size(options: FitOptions, tokens: int | None) -> int:
    """Return the samples of the first microbatch that is looked at: one, or a minibatch that
    nothing divides.
    """
    if options.order.divides:
        return 1
    usual = SAMPLES if tokens is None else max(1, TOKENS // tokens)
    return options.minibatch or usual


def _sizes(options: FitOptions, first: Profile, minibatch: int | None, gpus: int) -> list[int]:
    """Return the sizes of microbatches to choose from: powers of two that divide a minibatch, up to
    a GPU's share.
    """
    if options.batch_size is not None or minibatch is None or not options.order.divides:
        return [first.microbatch_size or 1]
    share = max(1, minibatch // gpus)
    powers = (2**n for n in range(share.bit_length()))
    return [size for size in powers if minibatch % size == 0]


def _saved(answer: Fit, profile: Profile, file: _ModelFile) -> Fit:
    """Write profile.json and plan.json, and return the answer with where they are and what could
    not be written.

    An answer without a plan leaves an earlier answer's files as they are: they belong together.
    """
    late: list[LateFailure] = []
    plan = answer.asked.plan
    if plan is None and (file.folder / "plan.json").exists():
        _log.warning(f"'{file.folder}' keeps the profile.json and plan.json of an earlier answer")
    else:
        with noting(late):
            replace_profile(profile, file.folder / "profile.json")

    if plan is not None:
        with noting(late):
            save_plan(plan, file.folder / "plan.json")

    log_failures(late, _log)
    model_file = os.path.relpath(file.path, file.folder)
    return replace(
        answer,
        folder=str(file.folder),
        model_file=model_file,
        late_failures=tuple(late),
    )


@keywords_of(TrainArguments)
def train(model: str | Path | TrainingSpec, plan: Plan, arguments: TrainArguments) -> TrainResult:
    """Train in worker processes on this host, as `plan` says.

    Args:
        model: the model file that the plan was made for; or what `in_memory` gives, whose functions
            and classes workers import. The model itself stays as it is: `save_weights` and
            `load_weights` bring the trained weights.
        plan: from `solve` or `load_plan`.

    Returns:
        What the run measured. What could not be written when it had ended, as a trace on a full
        disk, is logged, and is in `late_failures`.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the workers; no worker is left
            running.

    Example:
        >>> profile = planner.profile("model.py", batch_size=16, seconds=1)
        >>> plan = planner.solve(profile, planner.flat_cluster(2, 1e9), max_stages=2)
        >>> planner.train("model.py", plan, steps=4).minibatches
        4
    """
    if isinstance(model, TrainingSpec) and model.path is None:
        job = replace(make_job(model.origin, plan, arguments), in_memory=True)
        result = launch(job, trace_writer(job), packed_model(model))
    else:
        location = model.location if isinstance(model, TrainingSpec) else model
        result = run_job(make_job(location, plan, arguments))
    log_failures(result.late_failures, _log)
    return result


def run_job(job: Job) -> TrainResult:
    """Run `job` in worker processes on this host."""
    load_model_file(job.model)  # so that a mistake in it shows before any process starts
    return launch(job, trace_writer(job))


def trace_writer(job: Job) -> Callable[[Timeline], None]:
    """Return a function that writes the trace of a job."""
    return partial(save_trace, path=job.run_options.trace or "")


def check_elastic(plan: Plan, options: ElasticOptions) -> None:
    """Raise PlanError unless there is a plan for each number of hosts; InputError for hosts that
    meet nowhere.
    """
    least, most = options.hosts
    if LAUNCHER_VARIABLE not in os.environ and os.environ.get(
        "TORCHELASTIC_USE_AGENT_STORE"
    ) == str(True):
        what = "`elastic` starts torchrun's agents itself, and torchrun has started this process"
        raise InputError(what, hint="start plan train on every host, without torchrun")

    if plan.cluster.gpus % most:
        what = f"{plan.cluster.gpus} GPUs of the plan do not split evenly over {most} hosts"
        raise PlanError(what, hint="give `elastic=MIN:MAX` with the hosts of the plan as MAX")

    if not (options.rendezvous or "").rpartition(":")[2].isdecimal():
        what = f"hosts do not find each other at `rendezvous={options.rendezvous}`"
        raise InputError(
            what, hint="name a host that stays, and a free port of it: `rendezvous=host0:29500`"
        )

    for hosts in range(least, most):
        plan.on_gpus(plan.cluster.gpus // most * hosts)


def plan_left(plan: Plan) -> tuple[Plan, str]:
    """Return the plan for the workers that torchrun has started, and in words what it leaves of the
    whole one.
    """
    own = plan.on_gpus(int(os.environ["WORLD_SIZE"]))
    share = plan.predicted.seconds_per_minibatch / own.predicted.seconds_per_minibatch
    speed = "the whole speed"
    if own.cluster.gpus < plan.cluster.gpus:
        speed = f"{share:.0%} of the speed"
    return own, f"for {own.cluster.gpus} of {plan.cluster.gpus} GPUs ({speed})"


def schedule_files(plan: Plan) -> tuple[str, ...]:
    """Return the files that workers import for the plan's schedule; raise InputError where it has
    none.
    """
    if plan.schedule in SCHEDULES:
        return ()
    file = file_of(plan.schedule)
    if file is None:
        raise InputError(
            f"the schedule {plan.schedule} was typed into this session, and workers are processes "
            f"of their own",
            hint="write it into a file, and import that",
        )

    return (str(file),)


def _check_replan(options: DriftOptions) -> None:
    """Raise InputError where a run could never move to another plan.

    Only worker 0 needs the profile, which other hosts may not have.
    """
    if not options.replan or os.environ.get("RANK", "0") != "0":
        return
    if options.drift_window == 0:
        raise InputError(
            "`replan` moves where the run parts from its plan, and `drift_window=0` never looks",
            hint="leave out one of the two",
        )

    if options.profile is None:
        raise InputError(
            "`replan` solves again, and there is no profile that the plan was solved from",
            hint="give its `profile`",
        )


def make_job(model: str | Path, plan: Plan, arguments: TrainArguments) -> Job:
    """Return the job of `train`; raise InputError for arguments or a plan that it cannot run."""
    if arguments.steps is not None:
        refuse(arguments, "steps", "epochs")
    _check_runnable(plan, arguments)
    _check_replan(arguments)
    check_loss(plan, arguments)

    checkpoints = part_of(arguments, CheckpointOptions)
    weights = arguments.save_weights
    job = Job(
        model=str(model),
        plan=plan,
        steps=arguments.steps,
        epochs=arguments.epochs,
        seed=seed_of_run(checkpoints, plan, arguments.seed, arguments.baseline),
        device=arguments.device,
        backend=arguments.backend,
        baseline=arguments.baseline,
        save_weights=None if weights is None else str(weights),
        defer_weights=arguments.defer_weights,
        show_progress=arguments.show_progress,
        schedule_files=schedule_files(plan),
        options=part_of(arguments, TrainingOptions),
        checkpoints=checkpoints,
        run_options=part_of(arguments, RunOptions),
        drift=part_of(arguments, DriftOptions),
    )
    if os.environ.get("RANK", "0") == "0":  # on other hosts nothing is written
        for path in (job.save_weights, arguments.trace):
            if path is not None:
                check_writable(path)

    device_kind(job)  # so that another kind than the plan's shows before any process starts
    return job


def _check_runnable(plan: Plan, arguments: TrainArguments) -> None:
    """Raise InputError for a plan that cannot be trained, or a baseline that is asked for more than
    it does.
    """
    baseline = arguments.baseline
    if baseline is None:
        check_base(plan)
        check_trainable(plan)
        return

    for given, name in (
        (arguments.evaluate_every, "evaluate_every"),
        (arguments.save_weights, "save_weights"),
        (arguments.defer_weights, "defer_weights"),
    ):
        if given is not None:
            raise InputError(
                f"`{name}` is for plans, not for {baseline}",
                hint=f"leave out `{name}` or `baseline`",
            )

    if plan.master_weights is not None:
        raise InputError(
            f"{baseline} all-reduces gradients in the weights' own type, which is "
            f"{plan.master_weights} in this plan",
            hint="compare with a plan that has one stage",
        )
