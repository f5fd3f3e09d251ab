"""Whatever stands in a file: a verb answers, or says in one sentence what is wrong, within
seconds.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from planner.formats.cluster import flat_cluster
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.mutated.mutations import mutated
from tests.samples import layer, profile

LIMIT_S = 20
FEW, ALL, PER_TEST = 40, 1000, 100
CODES = (0, 1, 2, 3)


class Late(BaseException):
    """A verb took too long; no verb may take it for an error of its own."""


@dataclass(frozen=True)
class Question:
    """A verb, and the file that it reads."""

    file: str
    arguments: tuple[str, ...]


SOLVE = ("solve", "--time-limit", "2s")
QUESTIONS = (
    Question("profile.json", (*SOLVE, "--gpus", "3", "--bandwidth", "1Gbps")),
    Question(
        "profile.json", (*SOLVE, "--gpus", "4", "--bandwidth", "1Gbps", "--schedule", "1f1b-flush")
    ),
    Question("profile.json", ("show", "profile.json")),
    Question("profile.json", ("price", "--stages", "2", "--gpus", "2", "--bandwidth", "1Gbps")),
    Question("cluster.json", (*SOLVE, "--cluster", "cluster.json")),
    Question("plan.json", ("show", "plan.json")),
    Question("plan.json", ("simulate", "--minibatches", "8", "--trace", "trace.json")),
    Question("plan.json", ("compare", "--time-limit", "2s")),
    Question("plan.json", ("explain", "--time-limit", "2s")),
    Question("plan.json", ("report", "--time-limit", "2s")),
    Question("timeline.json", ("report", "--run", "timeline.json", "--time-limit", "2s")),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one right file of each kind."""
    folder = tmp_path_factory.mktemp("right")
    measured = profile(
        layer("embedding", 0.1, 0.2, output_bytes=4000, weight_bytes=8_000_000, saved_bytes=4000),
        layer("block", 0.3, 0.6, output_bytes=4000, weight_bytes=4_000_000, saved_bytes=9000),
        layer("head", 0.2, 0.4, output_bytes=400, weight_bytes=2_000_000, saved_bytes=4000),
        layer("loss", 0.01, 0.01),
    )
    save_profile(measured, folder / "profile.json")
    (folder / "cluster.json").write_text(
        flat_cluster(3, "1Gbps", "16GB").model_dump_json(), encoding="utf-8"
    )
    assert plan("solve", "--gpus", "3", "--bandwidth", "1Gbps", cwd=folder).returncode == 0
    done = plan("simulate", "--minibatches", "4", "--trace", "timeline.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def problem_with(question: Question, seed: int, files: Path, folder: Path) -> str | None:
    """Change the file of a question by the seed, ask, and say what is wrong with the answer; None
    for nothing.
    """
    shutil.copytree(files, folder)
    path = folder / question.file
    path.write_text(
        mutated(path.read_text("utf-8"), random.Random(seed)), encoding="utf-8", errors="replace"
    )

    name = f"seed {seed}: plan {' '.join(question.arguments)}"
    try:
        with time_limit(LIMIT_S):
            done = plan(*question.arguments, cwd=folder)
    except Late:
        return f"{name}: no answer within {LIMIT_S} s"

    if done.returncode not in CODES:
        return f"{name}: exit code {done.returncode}"
    for sign in ("bug in plan", "Traceback", "\x1b["):
        if sign in done.stderr + done.stdout:
            return f"{name}: {done.stderr[-400:]!r}"
    if done.returncode and not done.stderr.startswith("error: "):
        return f"{name}: exit code {done.returncode}, and no sentence: {done.stderr[-400:]!r}"
    return None


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise Late in this thread after so many seconds."""

    def end(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problems(seeds: range, files: Path, folder: Path) -> list[str]:
    found = (
        problem_with(QUESTIONS[seed % len(QUESTIONS)], seed, files, folder / str(seed))
        for seed in seeds
    )
    return [problem for problem in found if problem is not None]


def test_mutated_files_get_an_answer_or_a_sentence(files: Path, tmp_path: Path) -> None:
    assert problems(range(FEW), files, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(FEW, FEW + ALL, PER_TEST))
def test_many_mutated_files_get_an_answer_or_a_sentence(
    first: int, files: Path, tmp_path: Path
) -> None:
    assert problems(range(first, first + PER_TEST), files, tmp_path) == []
