"""A run in a trainer's words: what it comes to by our price, and a better one in the same words.

read        `planner.exports.trainers`
price       the stages that it describes, simulated as any plan's
better      the answer of the search, where the trainer has words for it, and the same run with
            other sizes; each is written, read and priced again as what these words say
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from planner.analysis.given_plan import price
from planner.errors import InputError, PlanError, PlannerError
from planner.exports.configuration import Asked, Configuration
from planner.exports.trainers import TRAINERS, Trainer, configuration_of
from planner.exports.transformers import layer_counts
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.fit import TrainerRun
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.option import given, refuse
from planner.options.verbs import FitOptions
from planner.plan.blocks import blocks_of
from planner.schedule.one_stage import FLUSH
from planner.solver.clock import Clock
from planner.stages.sharding import UNSHARDED, Sharding, usual_shardings, why_whole
from planner.units import SLACK

# Ranks and stages of runs beside the given one.
TENSOR_SIZES = (1, 2, 4, 8)
PIPELINE_SIZES = (1, 2, 4, 8, 16)
MOST_SIMULATED = 3  # of these, the fastest by the cost model
LEAST_S = 2.0  # to simulate the given run and a better one, whatever the time


@dataclass(frozen=True)
class GivenRun:
    """A run that a question gives in a trainer's words.

    Attributes:
        trainer: whose words these are.
        text: the words.
        run: what they say.
        asked: what the question says beside them.
    """

    trainer: Trainer
    text: str
    run: Configuration
    asked: Asked

    def read_again(self, run: Configuration) -> Configuration:
        """Return what the words for another run say.

        Raises:
            PlanError: where the trainer has none for it.
        """
        asked = Asked(gpus=run.gpus, file=self.asked.file)
        if not self.trainer.says_batches:
            asked = replace(asked, micro_batch=run.micro_batch, global_batch=run.global_batch)
        if not self.trainer.says_recomputation:
            asked = replace(asked, recomputes=run.recomputes)
        return self.trainer.read(self.trainer.write(run, self.text), asked)

    def wanted(self, options: FitOptions) -> FitOptions:
        """Return the options with what the words say; raise InputError where both say it."""
        option = self.trainer.option
        refuse(options, option, "tokens", "tensor", "offload")
        if not isinstance(options.gpu, str):
            raise InputError(
                f"`{option}` has no price on several kinds of GPUs",
                hint=f"ask about one kind, or leave out `{option}`",
            )

        run = self.run
        if run.length is not None:
            refuse(options, option, "length")
        if run.dtype is not None:
            refuse(options, option, "dtype")
        if run.autocast:
            refuse(options, option, "autocast")
        if run.precision is not None:
            refuse(options, option, "precision")
        servers = options.servers
        if run.machines is not None and options.gpus_per_server is None:
            servers = servers or run.machines
        return replace(
            options,
            batch_size=None,
            minibatch=run.global_batch,
            length=run.length or options.length,
            dtype=run.dtype or options.dtype,
            autocast=run.autocast or options.autocast,
            precision=run.precision or options.precision,
            offload="optimizer" if run.offload else None,
            stack=options.stack or run.stack,
            servers=servers,
        )


def given_run(options: FitOptions, gpus: int | None, model: str | Path) -> GivenRun | None:
    """Return the run that a question gives in a trainer's words; None where it gives none.

    Samples are as long as a model file says, whatever the run's words say.

    Raises:
        InputError: for several of them, and for words that say no run.
    """
    trainers = [trainer for trainer in TRAINERS if given(options, trainer.option)]
    if not trainers:
        return None
    trainer, *others = trainers
    refuse(options, trainer.option, *(other.option for other in others))

    words = getattr(options, trainer.option)
    if trainer.option == "megatron":
        refuse(options, trainer.option, "batch_size", "minibatch")
    recomputes = None
    if options.recompute != "auto" and not trainer.says_recomputation:
        recomputes = options.recompute != "never"
    asked = Asked(
        gpus=gpus,
        micro_batch=options.batch_size,
        global_batch=options.minibatch,
        recomputes=recomputes,
        file=Path(words) if trainer.in_file else Path(),
    )
    text = trainer.words(words)
    run = trainer.read(text, asked)
    if run.length is not None and says_length(model):
        remark = f"samples are as long as '{model}' says, and not {run.length} tokens"
        run = replace(run, length=None, remarks=(*run.remarks, remark))

    return GivenRun(trainer, text, replace(run, gpus=run.gpus or gpus), asked)


def says_length(model: str | Path) -> bool:
    """Return whether a model is a file that says how long its samples are; a builder's name may
    follow.
    """
    return Path(model).suffix.partition(":")[0] == ".py"


@dataclass(frozen=True)
class TrainerQuestion:
    """What a run in a trainer's words is priced for.

    Attributes:
        given: the run.
        cluster: that runs it.
        profile_at: returns the profile for microbatches of so many samples, with the costs of
            layers that ranks divide.
        clock: when the answer must be there.
    """

    given: GivenRun
    cluster: Cluster
    profile_at: Callable[[int], Profile]
    clock: Clock

    def priced(self, run: Configuration, clock: Clock) -> Plan:
        """Return the plan that a run is, priced and simulated as far as the time goes.

        Raises:
            InputError: for stages, GPUs or batches that do not divide.
        """
        profile = self.profile_at(run.micro_batch)
        cluster = self.cluster
        if run.tensor > 1:
            cluster = replace(cluster, sequence_parallel=run.sequence_parallel)
        return price(profile, cluster, stages_of(run, profile, cluster.gpus), clock=clock)


def answer_trainer(question: TrainerQuestion, found: Plan | None) -> TrainerRun:
    """Price a run, and look for a better one.

    Args:
        question: with the run.
        found: the fastest plan of a search; None where nothing fits.

    Raises:
        InputError: for words that describe no run of this model on these GPUs.
        PlanError: for a model that the trainer does not divide.
    """
    asked = question.given
    run, remark = as_priced(asked.run, question.cluster.gpus)
    plan = question.priced(run, question.clock.at_least(LEAST_S))
    _check_same(asked.trainer, run, plan)
    best, untried = _best(question, found)
    if untried:
        remark = (*remark, "the time limit ended the search before it tried all sizes")
    if best is not None and not _is_better(best.plan, plan):
        best = None
    arguments = None
    in_script: tuple[str, ...] = ()
    if best is not None:
        arguments = asked.trainer.write(best.run, asked.text)
        in_script = tuple(asked.trainer.in_script(best.run, arguments))

    bound_s = None if found is None else found.solver.lower_bound_s
    return TrainerRun(
        trainer=asked.trainer.title,
        given=plan,
        unknown=asked.run.unknown,
        remarks=(*asked.run.remarks, *remark),
        better=None if best is None else best.plan,
        arguments=arguments,
        in_script=in_script,
        bound_s=bound_s or None,
    )


def stages_of(run: Configuration, profile: Profile, gpus: int) -> OwnPlan:
    """Return the stages that a run has, of a profile with its microbatches.

    Raises:
        InputError: for stages, GPUs or batches that do not divide.
    """
    replicas = run.replicas(gpus)
    counts = run.layers_of_stages(len(blocks_of(profile)))
    sharding = run.sharding if replicas > 1 else UNSHARDED
    stages = tuple(
        OwnStage(
            blocks=count,
            replicas=replicas,
            tensor=run.tensor,
            sharded=sharding.divides_anything,
            sharding_level=sharding.level_in_files,
            shard_group=sharding.group or None,
            recompute=run.recomputed_of(count),
        )
        for count in counts
    )
    return OwnPlan(
        stages=stages,
        schedule=run.schedule_of(len(counts)),
        microbatches=run.global_batch // run.micro_batch,
        chunks=len(counts) // run.pipeline,
    )


def as_priced(run: Configuration, gpus: int) -> tuple[Configuration, tuple[str, ...]]:
    """Return a run as near to a given one as there is a price for, and what is different."""
    if not run.sharding.divides_gradients:
        return run, ()
    replicas = run.replicas(gpus)
    microbatches = run.global_batch // run.micro_batch
    stages = [replicas] * run.pipeline
    if why_whole(run.schedule, microbatches, stages) is None:
        return run, ()
    return replace(run, sharding=run.sharding.of_optimizer_alone()._replace(group=0)), (
        f"the run shards {run.sharding.words} over {replicas} replicas "
        f"together with stages, and its price here is of a sharded "
        f"optimizer's state alone: it sends more and needs less memory",
    )


@dataclass(frozen=True)
class _Priced:
    run: Configuration
    plan: Plan


def _best(question: TrainerQuestion, found: Plan | None) -> tuple[_Priced | None, bool]:
    """Return the fastest run that fits the memory, priced; None where none was found in time. And
    whether the time ended before all were priced.
    """
    runs = [] if found is None else _as_run(found, question.given.run)
    runs += _others(question)

    no_time = Clock.of(0.0)
    promising: list[_Priced] = []
    untried = False
    for run in dict.fromkeys(runs):
        if promising and question.clock.passed:
            untried = True
            break
        priced = _priced(question, run, no_time)
        if priced is not None and priced.plan.fits:
            promising.append(priced)

    promising.sort(key=lambda each: _seconds(each.plan))

    best: _Priced | None = None
    for each in promising[:MOST_SIMULATED]:
        if best is not None and question.clock.passed:
            break
        priced = _priced(question, each.run, question.clock.at_least(LEAST_S))
        if priced is None:
            continue
        if best is None or _seconds(priced.plan) < _seconds(best.plan):
            best = priced

    return best, untried


def _priced(question: TrainerQuestion, run: Configuration, clock: Clock) -> _Priced | None:
    """Return the plan of a run as its words say it; None where the trainer has no such words, where
    there is no such run of this model, or where it is priced as another one.
    """
    asked = question.given
    try:
        said = asked.read_again(run)
        if said.unknown or as_priced(said, question.cluster.gpus)[1]:
            return None
        plan = question.priced(said, clock)
        _check_same(asked.trainer, said, plan)
        return _Priced(said, plan)
    except PlannerError:  # sizes that do not divide, of which a grid has many
        return None


def _as_run(found: Plan, given: Configuration) -> list[Configuration]:
    """Return the answer of a search as trainers are told it, if there are words for it, with what a
    given run says beside its stages.
    """
    try:
        run = configuration_of(found)
    except PlanError:
        return []

    return [
        replace(
            run,
            machines=given.machines,
            length=given.length,
            dtype=given.dtype,
            autocast=given.autocast,
            precision=given.precision,
            offload=given.offload,
            stack=given.stack,
        )
    ]


def _others(question: TrainerQuestion) -> Iterator[Configuration]:
    """Yield the run with other sizes, of microbatches up to twice those that it has."""
    run = question.given.run
    gpus = question.cluster.gpus
    plain = replace(
        run,
        gpus=gpus,
        schedule=FLUSH,
        chunks=None,
        layers_per_chunk=None,
        stage_layers=(),
        first_layers=None,
        last_layers=None,
        lighter_ends=None,
        recomputed_layers=None,
        recompute_every=1,
        unknown=(),
        remarks=(),
    )
    sizes = sorted({run.micro_batch, 2 * run.micro_batch})
    for tensor, pipeline, size, recomputes in product(
        TENSOR_SIZES, PIPELINE_SIZES, sizes, (False, True)
    ):
        if gpus % (tensor * pipeline):
            continue
        other = replace(
            plain,
            tensor=tensor,
            pipeline=pipeline,
            micro_batch=size,
            recomputes=recomputes,
            sequence_parallel=tensor > 1 and (run.sequence_parallel or run.tensor == 1),
        )
        for sharding in _shardings(question, gpus // tensor // pipeline):
            yield replace(other, sharding=sharding)


def _shardings(question: TrainerQuestion, replicas: int) -> Iterator[Sharding]:
    yield UNSHARDED
    if replicas == 1:
        return
    inside, *between = question.cluster.joined
    yield from usual_shardings(replicas, inside.size if between else None, whole=True)


def _check_same(trainer: Trainer, run: Configuration, plan: Plan) -> None:
    """Check that a plan is the run that it was priced for.

    Raises:
        PlanError: for a model that the trainer does not divide.
        InputError: where ranks divide something else here than they do there.
    """
    if trainer.for_transformers or len(plan.stages) > 1:
        layer_counts(plan, trainer.title)
    try:
        if _sizes(configuration_of(plan)) == _sizes(run):
            return
    except PlanError:
        pass

    raise InputError(
        f"ranks that share '{plan.model}' shard its experts and the samples of a microbatch here, "
        f"and whole layers in {trainer.title}, so `{trainer.option}` has no price",
        hint="ask without it, and compare the speeds",
    )


def _sizes(run: Configuration) -> tuple[int, ...]:
    return run.tensor, run.pipeline, run.micro_batch, run.global_batch


def _is_better(plan: Plan, given: Plan) -> bool:
    return not given.fits or _seconds(plan) < _seconds(given) * (1 - SLACK)


def _seconds(plan: Plan) -> float:
    return plan.predicted.seconds_per_minibatch
