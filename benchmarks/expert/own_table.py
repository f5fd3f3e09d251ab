"""Is an answer ever slower than a row of its own table, at equally many samples per update?

    python -m benchmarks.expert.own_table --questions 200 --save

Draws models, GPUs, servers, links and samples per update by a seed, fewer samples than GPUs among
them, and asks each time what `plan fit` asks. A model is estimated once for several questions.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from benchmarks.kept import printed
from planner.api.servers import Servers
from planner.catalog.models import find_model
from planner.formats.device_kinds import planned_bytes
from planner.formats.plan_parts import short_config
from planner.formats.profile import Profile
from planner.model.spec import load_model_file
from planner.options.verbs import FitOptions
from planner.profiler.estimated.devices import usual_dtype
from planner.profiler.estimated.estimate import EstimateOptions, Estimator
from planner.reporting.tables.verdict import share_of_speed
from planner.solver.clock import Clock
from planner.solver.fit import FitRequest, fit
from planner.solver.sizes.microbatches import Profiles
from planner.solver.tuning.record import STANDARD

HERE = Path(__file__).parent
MODELS = (
    "bert-large",
    "gpt2-medium",
    "gpt2-xl",
    "t5-large",
    "vit-large",
    "llama-3.2-1b",
    "llama-3-8b",
    "llama-70b",
)
GPUS = ("a100-80gb", "h100", "b200", "rtx-4090", "t4")
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
BETWEEN = ("10Gbps", "100Gbps", "3200Gbps")
MOST_SIZE = 16  # samples of a microbatch
QUESTIONS_EACH = 10  # that share a model, its GPUs and its estimates
# What a simpler plan in place of a faster row says.
SIMPLER = "is less simple"


@dataclass(frozen=True)
class Setup:
    """A model on a kind of GPU, which is estimated once.

    Attributes:
        length: tokens of a sample; None for images.
    """

    model: str
    gpu: str
    length: int | None


@dataclass(frozen=True)
class Question:
    """What is asked of a setup."""

    setup: Setup
    gpus: int
    between: str  # bandwidth between servers
    samples: int  # per update

    def __str__(self) -> str:
        length = "" if self.setup.length is None else f" of {self.setup.length} tokens"
        return (
            f"{self.setup.model}, {self.gpus} {self.setup.gpu}, {self.between}, "
            f"{self.samples} samples{length}"
        )


@dataclass(frozen=True)
class Row:
    """The answer to a question beside the fastest row of its table.

    Attributes:
        config: of the answer.
        fastest: the row's name; empty without any that fits and has as many samples per update.
        speed: of the answer, relative to the row's.
        explained: whether the answer says that it is the simpler of two equal ones.
        others: rows of other samples per update.
    """

    question: Question
    config: str
    fastest: str = ""
    speed: float = 1.0
    explained: bool = False
    others: int = 0
    seconds: float = 0.0

    @property
    def slower(self) -> bool:
        """Whether the row is told apart from the answer, as the solver tells plans apart."""
        return self.speed < 1 - STANDARD.answer.indistinguishable_share

    def cells(self, number: int) -> str:
        return (
            f"| {number} | {self.question} | {self.config} | {self.fastest} | {self.speed:.3f} | "
            f"{'yes' if self.explained else ''} | {self.seconds:.0f} |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions, and print those whose answer is slower than a row of its table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert.own_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first to ask")
    parser.add_argument("--until", type=int, help="number of the first not to ask")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of each (default: %(default)s)"
    )
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to own_table.md beside this"
    )
    args = parser.parse_args(argv)

    questions = list(drawn(args.seed, args.questions))
    asked = range(len(questions))[args.first : args.until]
    with printed(HERE, save=args.save, name="own_table.md"):
        print("| number | question | answer | fastest row | answer over it | simpler | seconds |")
        print("|---|---|---|---|---|---|---|")
        rows = []
        for number in asked:
            rows.append(answered(questions[number], args.seconds))
            print(rows[-1].cells(number), flush=True)
        print(f"\n{summary(rows)}")
    return 1 if any(row.slower and not row.explained for row in rows) else 0


def summary(rows: Sequence[Row]) -> str:
    """Say how many answers are slower than a row of their table."""
    answers = sum(bool(row.fastest) for row in rows)
    slower = [row for row in rows if row.slower]
    explained = [row for row in slower if row.explained]
    worst = min((row.speed for row in explained), default=1.0)
    return (
        f"{len(rows)} questions, {answers} with an answer and a row that fits: {len(slower)} "
        f"answers are slower than a row; {len(explained)} of these say that they are the simpler "
        f"of two that estimates do not tell apart, the slowest {worst:.3f} times as fast. "
        f"{sum(row.others for row in rows)} rows had other samples per update."
    )


def drawn(seed: int, count: int) -> Iterator[Question]:
    """Draw questions; the first ones are the same for any count."""
    rng = random.Random(seed)
    setup = Setup("", "", None)
    for number in range(count):
        if number % QUESTIONS_EACH == 0:
            model = rng.choice(MODELS)
            length = None if model.startswith("vit") else rng.choice((512, 1024))
            if model.startswith("bert"):
                length = 512
            setup = Setup(model, rng.choice(GPUS), length)
        samples = round(2 ** rng.uniform(0, 11))
        yield Question(setup, rng.choice(COUNTS), rng.choice(BETWEEN), max(1, samples))


def answered(question: Question, seconds: float) -> Row:
    """Ask, and compare the answer with the rows of its table."""
    began_s = time.monotonic()
    answer, _ = fit(request_for(question, seconds))
    took_s = time.monotonic() - began_s
    plan = answer.asked.plan
    if plan is None:
        return Row(question, f"none: {answer.asked.why_not[:60]}", seconds=took_s)

    same = [way for way in plan.baselines if way.samples_per_update == plan.samples_per_update]
    fitting = [way for way in same if not way.over_memory_bytes]
    config = short_config(plan.config)
    others = len(plan.baselines) - len(same)
    if not fitting:
        return Row(question, config, others=others, seconds=took_s)

    fastest = max(fitting, key=partial(share_of_speed, plan))
    return Row(
        question,
        config,
        fastest.name,
        1 / share_of_speed(plan, fastest),
        any(SIMPLER in note for note in plan.notes),
        others,
        took_s,
    )


def request_for(question: Question, seconds: float) -> FitRequest:
    """Return what `plan fit` asks with its defaults."""
    samples = question.samples
    options = FitOptions(
        gpu=question.setup.gpu,
        bandwidth=None,
        minibatch=samples,
        time_limit_s=seconds,
    )
    servers = Servers.of(question.gpus, options)
    if servers.count > 1:
        both = [servers.rates[0], question.between]
        servers = Servers.of(question.gpus, FitOptions(gpu=question.setup.gpu, bandwidth=both))

    estimates = estimates_of(question.setup)
    first = estimates.profile(1)
    share = max(1, samples // question.gpus)
    powers = [2**power for power in range(share.bit_length()) if 2**power <= MOST_SIZE]
    profiles = Profiles(
        estimates.profile,
        estimates.divided,
        [size for size in powers if samples % size == 0],
        8,
    )
    return FitRequest(
        profiles,
        question.gpus,
        partial(servers.cluster_of, memory=planned_bytes(first.device)),
        options,
        Clock.of(seconds),
    )


class Estimates:
    """The profiles of a setup, each of which is estimated once."""

    def __init__(self, setup: Setup) -> None:
        self._folder = tempfile.TemporaryDirectory()
        named = find_model(setup.model)
        path = named.write(Path(self._folder.name), named.tokens(setup.length))
        how = EstimateOptions(
            setup.gpu,
            usual_dtype(setup.gpu),
            master_weights=True,
            tensor=[2, 4, 8],
            where_divided=True,
        )
        self._estimator = Estimator(load_model_file(path), how)
        self._plain: dict[int, Profile] = {}
        self._divided: dict[int, Profile] = {}

    def profile(self, size: int) -> Profile:
        if size not in self._plain:
            self._plain[size] = self._estimator.profile(size)
        return self._plain[size]

    def divided(self, profile: Profile) -> Profile:
        size = profile.microbatch_size or 1
        if size not in self._divided:
            self._divided[size] = self._estimator.divided(profile)
        return self._divided[size]


@cache
def estimates_of(setup: Setup) -> Estimates:
    """Return the estimates of a setup, the same object for the same one."""
    return Estimates(setup)


if __name__ == "__main__":
    sys.exit(main())
