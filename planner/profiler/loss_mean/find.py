"""Find what a loss is a mean over: the one answer that explains every trial, where a trial speaks
against each other.

An answer gives each part of a batch its share. It explains a trial if the losses of the parts,
weighted by their shares, add up to the loss of the whole, and the gradients do. The trials are

1. batches of the model file's own: the example batch, with its weights and with changed ones, under
   which a head that begins at zero is none; and batches from several places of the dataset;
2. the example batch with other labels and masks in one half: those that the model looks for, and
   those that people pad with.

No answer explains the first: then the loss belongs to the whole batch. One explains the first and
not all of the second: then it holds as long as those labels do not come, and training refuses them.
"""

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from planner.errors import ModelFileError, first_line
from planner.formats.files import replace
from planner.formats.profile import ForbiddenLabel, LossMean
from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.loss import labels_of, shares_by_samples, shares_function
from planner.model.options import ModuleOptions
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.model.torch_private import tree_leaves
from planner.profiler.loss_mean.buffers import buffer_of_parts
from planner.profiler.loss_mean.same_noise import UnequalNoiseError
from planner.profiler.loss_mean.trial import (
    MOST_IN_FLOAT64,
    Attempt,
    ModelOnTrial,
    TargetTrials,
    Trial,
    on_trial,
    ranges,
)
from planner.profiler.loss_mean.variations import Variation, spread, variations, varied

_log = logging.getLogger(__name__)
GUESSING_S = 10.0  # for trials of labels that the model is not seen to look for
_SAMPLES, _OF_LARGE = 5, 2  # of a trial: parts of three and two, or for large models of one each
_PLACES = 3  # of the dataset, from each of which a batch is taken

SAMPLES = LossMean(over="samples")
_DEPENDS_ON_PADDING = LossMean(
    over="unchecked",
    reason="it depends on how far samples are padded, and collate() pads each microbatch to its "
    "own longest sample",
)


class Evidence(NamedTuple):
    """What the trials were."""

    natural: tuple[Trial, ...]  # of batches of the model file's own
    varied: tuple[Trial, ...]  # with labels and masks that these may not have
    padded: tuple[Trial, ...] = ()  # whose parts collate() has padded to their own lengths

    @property
    def tells(self) -> bool:
        return any(trial.tells for trial in self.natural)


def find_loss_mean(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch: Batch,
    options: ModuleOptions,
    *,
    reads_data: bool = True,
) -> LossMean | None:
    """Return what the loss is a mean over; None where memory has no room for a trial, or weights
    have no values.

    Args:
        reads_data: whether to take batches of the model file's dataset, too.

    Raises:
        ModelFileError: when the model file's loss_weight() does not count what the loss is a mean
            over.
    """
    if any(parameter.is_meta for parameter in graph.model.parameters()):
        return None
    evidence = gather(spec, graph, batch, options, reads_data=reads_data)
    if not isinstance(evidence, Evidence):
        return evidence
    with generators_kept():
        small = small_batch(spec, graph, batch)
    buffer = buffer_of_parts(spec, graph.model, small, options, attempts(spec, graph))
    if buffer is not None:
        return LossMean(
            over="unchecked", reason=f"forward() changes buffer '{buffer}' once for each microbatch"
        )

    if spec.defines("loss_weight"):
        return _own_weight(spec, evidence)
    return _answer(spec, graph, batch, evidence)


def gather(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, options: ModuleOptions, *, reads_data: bool
) -> Evidence | LossMean | None:
    """Run the trials; where none can be run, return what is then known of the loss, or None for
    want of memory.
    """
    reason = ""
    try:
        for attempt in attempts(spec, graph):
            found = _attempt(spec, graph, batch, options, attempt, reads_data=reads_data)
            if isinstance(found, Evidence):
                return found
            reason = found
    except torch.OutOfMemoryError:
        return None

    if spec.defines("loss_weight"):
        return LossMean(over="loss_weight")
    return LossMean(over="unchecked", reason=reason)


def _attempt(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch: Batch,
    options: ModuleOptions,
    attempt: Attempt,
    *,
    reads_data: bool,
) -> Evidence | str:
    """Run the trials in one way; return why that cannot be, where a part of the batch is no part of
    the whole.
    """
    options = replace(options, autocast=None, half=None, compiled=False)
    try:
        with (
            generators_kept(),
            warnings.catch_warnings(),
            on_trial(spec, graph.model, options, attempt) as model,
        ):
            warnings.simplefilter("ignore")  # of the model, about labels that are none of its own
            small = small_batch(spec, graph, batch)
            first = model.try_whole(small)
            if not model.repeats(small, first):
                return (
                    "it differs from call to call, with the same batch and the same random numbers"
                )
            return _run(spec, graph, model, small, first, reads_data=reads_data)
    except (ModelFileError, torch.OutOfMemoryError):
        raise
    except UnequalNoiseError as cause:
        return str(cause)
    except Exception as cause:  # whatever a model raises that takes float32 only, or one batch size
        return f"a part of a batch cannot be run: {first_line(cause)}"


def attempts(spec: TrainingSpec, graph: LayerGraph) -> list[Attempt]:
    """Return the ways to run a model, the most telling first."""
    found = [
        Attempt(torch.float32),
        # for a model that casts by hand what its autocast takes
        Attempt(torch.float32, autocasts=True),
        Attempt(torch.float32, evaluates=True),
    ]
    if not is_large(graph):
        found.insert(0, Attempt(torch.float64))
    if graph.batch_size is not None and spec.loss is not None:
        # Nobody can run the whole minibatch of such a model: its loss is that of the microbatches'
        # outputs.
        found.append(Attempt(torch.float32, divides_outputs=True))

    return found


def is_large(graph: LayerGraph) -> bool:
    return sum(parameter.numel() for parameter in graph.model.parameters()) > MOST_IN_FLOAT64


def _run(
    spec: TrainingSpec,
    graph: LayerGraph,
    model: ModelOnTrial,
    batch: Batch,
    first: Trial,
    *,
    reads_data: bool,
) -> Evidence:
    """Run all trials of a model that can be run, after the first one."""
    natural = [first]
    model.perturb()
    of_target = None
    if is_large(graph) and spec.loss is not None:
        of_target = model.target_trials(batch)
        perturbed: Trial | None = of_target(batch, None)
    else:
        perturbed = _tried(model, batch, gradients=not is_large(graph))

    if perturbed is not None and perturbed.whole.finite:
        natural.append(perturbed)

    padded = []
    for each, parts in _of_dataset(spec, batch) if reads_data else ():
        trial = _tried(model, each, gradients=not is_large(graph))
        if trial is not None:
            natural.append(trial)
        trial = None
        if graph.lengths:
            trial = _tried(model, each, parts=parts)
        if trial is not None:
            padded.append(trial)

    if not any(trial.tells for trial in natural):
        # One sample that is repeated, or an example batch of zeros.
        trial = _tried(model, spread(batch), gradients=True)
        if trial is not None:
            batch = spread(batch)
            of_target = None
            natural.append(trial)

    return Evidence(
        tuple(natural), tuple(vary(spec, graph, model, batch, of_target)), tuple(padded)
    )


def vary(
    spec: TrainingSpec,
    graph: LayerGraph,
    model: ModelOnTrial,
    batch: Batch,
    of_target: TargetTrials | None = None,
    *,
    guesses: bool = True,
) -> Iterator[Trial]:
    """Yield the trials of other labels and masks that are legal; without `guesses`, of those that
    the model names.
    """
    arguments = len(tree_leaves((batch.args, batch.kwargs)))
    until_s = time.monotonic() + GUESSING_S
    for variation in variations(graph, batch, model.noted.numbers):
        if not (guesses or variation.known):
            continue
        in_target = variation.leaf >= arguments
        # Other targets need no more than the outputs that are there.
        if (
            not variation.known
            and not in_target
            and (is_large(graph) or time.monotonic() > until_s)
        ):
            continue
        changed = varied(batch, variation, len(ranges(batch.size)[0]))
        if changed is None:
            continue
        if not in_target:
            trial = _tried(model, changed, variation)
        elif spec.loss is None:
            continue  # nobody reads the target
        else:
            of_target = of_target or model.target_trials(batch)
            try:
                trial = of_target(changed, variation)
            except Exception as cause:  # no label of the model
                _log.debug("labels of %d: %s", variation.value, cause)
                continue
        if trial is not None and trial.whole.finite:
            yield trial


def _tried(
    model: ModelOnTrial,
    batch: Batch,
    variation: Variation | None = None,
    *,
    gradients: bool = False,
    parts: tuple[Batch, ...] | None = None,
) -> Trial | None:
    """Run a trial; return None where the model does not take the batch, or its loss is not
    finite.
    """
    try:
        trial = model.try_whole(batch, variation, gradients=gradients, parts=parts)
    # whatever a model raises at a number that is no label or index of its own
    except Exception as cause:
        _log.debug("a batch that the model does not take: %s", cause)
        return None
    return trial if trial.whole.finite else None


def _answer(spec: TrainingSpec, graph: LayerGraph, batch: Batch, evidence: Evidence) -> LossMean:
    if not evidence.tells:
        return LossMean(over="unchecked", reason="all samples of example_batch() are alike")

    explaining = [each for each in _hypotheses(evidence) if explains(spec, each, evidence.natural)]
    if not explaining:
        return LossMean(over="batch")
    refuting = {each: against(spec, each, explaining, evidence.varied) for each in explaining}
    best = min(explaining, key=lambda each: (len(refuting[each]), explaining.index(each)))
    if best.over == "labels" and _is_sample_label(best, evidence):
        # Where each sample has a label that counts, samples do, and no worker has to read whole
        # minibatches.
        best = next((each for each in explaining if each.over == "samples"), best)

    if not explains(spec, best, evidence.padded):
        return _DEPENDS_ON_PADDING
    return with_forbidden(best, refuting[best], evidence)


def _hypotheses(evidence: Evidence) -> list[LossMean]:
    """Return all answers that may be: over labels only where a trial had labels to ignore."""
    found = [SAMPLES, LossMean(over="sum")]
    usual = labels_of(evidence.natural[0].parts[0])
    leaves = evidence.natural[0].parts[0].flatten()[0]
    for trial in evidence.varied:
        assert trial.variation is not None
        leaf = trial.variation.leaf
        value = trial.variation.value
        place = None if leaves[leaf] is usual else leaf
        found.append(LossMean(over="labels", ignored=value, leaf=place))
        if leaves[leaf].dim() > 1 and leaves[leaf].shape[1] > 1:
            found.append(LossMean(over="labels", ignored=value, leaf=place, shifted=True))

    return found


def explains(spec: TrainingSpec, mean: LossMean, trials: Sequence[Trial]) -> bool:
    return all(trial.explained_by(_shares(spec, mean, trial)) for trial in trials)


def against(
    spec: TrainingSpec, mean: LossMean, answers: Sequence[LossMean], trials: Sequence[Trial]
) -> list[Trial]:
    """Return the trials that an answer does not explain, or that another one with other shares
    explains as well.
    """
    found = []
    for trial in trials:
        shares = _shares(spec, mean, trial)
        rivals = (_shares(spec, each, trial) for each in answers if _counts(each, trial))
        ambiguous = any(rival != shares and trial.explained_by(rival) for rival in rivals)
        if ambiguous or not trial.explained_by(shares):
            found.append(trial)
    return found


def _counts(mean: LossMean, trial: Trial) -> bool:
    """Return whether an answer is one for which the trial was made."""
    return mean.over == "samples" or (
        trial.variation is not None and mean.ignored == trial.variation.value
    )


def _shares(spec: TrainingSpec, mean: LossMean, trial: Trial) -> list[float]:
    shares_of = shares_function(mean, spec) or shares_by_samples
    return shares_of(trial.parts)


def _is_sample_label(mean: LossMean, evidence: Evidence) -> bool:
    """Return whether the labels are one per sample, and all of those that were seen count."""
    for trial in evidence.natural:
        for each in trial.parts:
            labels = labels_of(each, mean.leaf)
            if (
                labels is None
                or mean.ignored is None
                or labels.dim() > 1
                or bool(labels.eq(mean.ignored).any())
            ):
                return False

    return True


def with_forbidden(mean: LossMean, refuting: Sequence[Trial], evidence: Evidence) -> LossMean:
    """Return the answer with the labels that it does not hold for; none holds where the model file
    has such labels.
    """
    forbidden = []
    for trial in refuting:
        assert trial.variation is not None
        forbidden.append(ForbiddenLabel(leaf=trial.variation.leaf, value=trial.variation.value))

    for each in forbidden:
        for trial in evidence.natural:
            if any(_has(batch, each) for batch in trial.parts):
                return LossMean(over="batch")

    return replace(mean, forbidden=tuple(forbidden))


def _has(batch: Batch, label: ForbiddenLabel) -> bool:
    leaf = batch.flatten()[0][label.leaf]
    return isinstance(leaf, Tensor) and bool((leaf == label.value).any())


def _own_weight(spec: TrainingSpec, evidence: Evidence) -> LossMean:
    """Return that the user's function weighs the parts, if it does."""
    mean = LossMean(over="loss_weight")
    for trial in evidence.natural:
        error = trial.error_of(_shares(spec, mean, trial))
        if error > 1:
            raise ModelFileError(
                f"loss_weight() of '{spec.origin}' does not count what the loss is a mean over: "
                f"weighted by it, the "
                f"losses and gradients of the parts of a batch differ from those of the whole by "
                f"{error:.1e} times "
                "what rounding explains",
                hint="return how many labels of the target the loss is a mean over",
            )

    if not explains(spec, mean, evidence.padded):
        return _DEPENDS_ON_PADDING
    known = [trial for trial in evidence.varied if _is_weighed(spec, trial)]
    return with_forbidden(mean, against(spec, mean, [mean], known), evidence)


def _is_weighed(spec: TrainingSpec, trial: Trial) -> bool:
    """Return whether the user's function takes the labels of a trial."""
    try:
        return all(spec.loss_weight(each.target) >= 0 for each in trial.parts)
    except ModelFileError as cause:
        _log.debug("loss_weight() of a varied batch: %s", cause)
        return False


def small_batch(spec: TrainingSpec, graph: LayerGraph, batch: Batch) -> Batch:
    """Return a batch of few samples, or of as many as the model takes."""
    samples = _OF_LARGE if is_large(graph) else _SAMPLES
    if graph.batch_size is not None or batch.size == samples:
        return batch
    return spec.example_batch(samples).to(batch.device_type)


def _of_dataset(spec: TrainingSpec, like: Batch) -> Iterator[tuple[Batch, tuple[Batch, ...]]]:
    """Yield batches from several places of the dataset, each with its parts as collate() makes them
    of their samples.

    None where it cannot be read here.
    """
    try:
        dataset = spec.dataset()
        length = 0 if dataset is None else len(dataset)  # type: ignore[arg-type]
        starts = sorted({length * place // _PLACES for place in range(_PLACES)})
        batches = []
        for start in starts if length else ():
            end = min(start + like.size, length)
            items = [dataset[index] for index in range(start, end)]  # type: ignore[index]
            parts = [items[each.start : each.stop] for each in ranges(len(items))]
            batches.append(
                (spec.collate(items), tuple(spec.collate(part) for part in parts if part))
            )
    # whatever the user's code raises, on a machine without the data perhaps
    except Exception as cause:
        _log.warning(
            "labels that only dataset() has are not known, because it cannot be read: %s",
            first_line(cause),
        )
        return

    for batch, of_parts in batches:
        if batch.size == like.size and len(batch.flatten()[0]) == len(like.flatten()[0]):
            yield batch.to(like.device_type), tuple(part.to(like.device_type) for part in of_parts)
