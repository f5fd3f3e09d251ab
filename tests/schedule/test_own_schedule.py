"""A schedule of a user's file: its order, what of it is planned, and training that equals one
process.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import planner
from planner.cli.main import main
from planner.errors import InputError
from planner.executor.run.data import make_batches
from planner.formats.profile import Profile
from planner.model.spec import load_model_file
from planner.schedule import registry
from planner.schedule.instructions import Unit
from planner.schedule.one_stage import GPipe
from planner.schedule.own_file import load_schedules
from planner.schedule.schedule import Channel, PipelineShape, Schedule
from tests.executor.plans import structural_profile
from tests.executor.reference import plain_training
from tests.schedule.check import check_streams
from tests.schedule.draw import draw_order

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "own_schedule.py"
MODEL = ROOT / "tests" / "docs" / "small_model.py"
NAME = "gpipe-newest-first"
SIZE, MICROBATCHES, STEPS = 8, 4, 3


@pytest.fixture(autouse=True)
def no_others() -> Iterator[None]:
    """Forget what a test has registered."""
    known, names = dict(registry._registered), list(registry.NAMES)
    yield
    registry._registered.clear()
    registry._registered.update(known)
    registry.NAMES[:] = names


@pytest.fixture
def schedule() -> Schedule:
    load_schedules(EXAMPLE)
    return registry.find(NAME)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return structural_profile(MODEL, SIZE)


def shape_of(schedule: Schedule, replicas: int, microbatches: int) -> PipelineShape:
    ranks = tuple(range(replicas)), (replicas,)
    return PipelineShape(ranks, (Channel(0, 1),), schedule, microbatches)


def test_its_order(schedule: Schedule) -> None:
    assert draw_order(shape_of(schedule, 1, 3), 1) == [
        "F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U0",
        "F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U0",
    ]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_no_shape_deadlocks(schedule: Schedule, replicas: int) -> None:
    for microbatches in range(replicas, 9):
        check_streams(shape_of(schedule, replicas, microbatches), 3)


def test_it_is_planned_by_its_formula(schedule: Schedule, profile: Profile) -> None:
    cluster = planner.flat_cluster(2, "1Gbps")
    plan = planner.solve(profile, cluster, schedule=NAME, microbatches=MICROBATCHES, max_stages=2)
    assert plan.schedule is schedule
    assert plan.predicted.by == "simulation"


def test_one_without_a_formula_is_simulated_for_chosen_stages(profile: Profile) -> None:
    class Unbounded(GPipe):
        name = "unbounded"
        formula = None

    planner.register_schedule(Unbounded())
    cluster = planner.flat_cluster(2, "1Gbps")
    with pytest.raises(InputError, match=r"unbounded has no cost formula.*\n?.*plan price"):
        planner.solve(profile, cluster, schedule="unbounded", microbatches=MICROBATCHES)
    plan, same = (
        planner.price(profile, cluster, 2, replicas=1, schedule=name, microbatches=MICROBATCHES)
        for name in ("unbounded", "gpipe")
    )
    assert plan.predicted.by == "simulation"
    assert plan.predicted.seconds_per_minibatch == same.predicted.seconds_per_minibatch
    with pytest.raises(InputError, match="workers are processes"):
        _typed_into_a_session(plan)


def _typed_into_a_session(plan: planner.Plan) -> None:
    """Train under a schedule whose module has no file, as that of a notebook."""
    module = sys.modules[type(plan.schedule).__module__]
    path, module.__file__ = module.__file__, None
    try:
        planner.train(MODEL, plan, steps=1)
    finally:
        module.__file__ = path


def test_two_processes_train_as_one(profile: Profile, schedule: Schedule, tmp_path: Path) -> None:
    """On the command line, which names the file for every verb."""
    for name in (EXAMPLE, MODEL):
        shutil.copy(name, tmp_path)
    planner.save_profile(profile, tmp_path / "profile.json")
    own = ["--schedule-from", EXAMPLE.name]
    chosen = ["--stages", "2", "--replicas", "1", "--microbatches", str(MICROBATCHES)]
    run(tmp_path, "price", *chosen, "--gpus", "2", "--bandwidth", "1Gbps", "--schedule", NAME, *own)
    assert json.loads(run(tmp_path, "simulate", "--json", *own))["schedule"] == NAME
    training = ["train", MODEL.name, "--steps", str(STEPS), "--save-weights", "w.pt", "--json"]
    answer = json.loads(run(tmp_path, *training, *own))

    spec = load_model_file(MODEL)
    torch.manual_seed(0)
    model = spec.build_model()
    data = make_batches(spec, SIZE, MICROBATCHES, seed=0)

    def losses_of(model: torch.nn.Module, minibatch: int) -> list[torch.Tensor]:
        batches = [data.batch(Unit(minibatch, number)) for number in range(MICROBATCHES)]
        assert spec.loss is not None
        return [spec.loss(model(*batch.args), batch.target) for batch in batches]

    expected, weights = plain_training(model, spec.optimizer, losses_of, STEPS)
    assert [each["loss"] for each in answer["losses"]] == pytest.approx(expected, rel=1e-5)
    trained = torch.load(tmp_path / "w.pt", weights_only=True)
    torch.testing.assert_close(trained, dict(weights), rtol=1e-4, atol=1e-6)


def run(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_another_process_finds_it(schedule: Schedule) -> None:
    assert pickle.loads(pickle.dumps(schedule)) is schedule


def test_a_name_is_taken_once(schedule: Schedule) -> None:
    load_schedules(EXAMPLE)  # again: the newer one takes its place
    assert registry.NAMES.count(NAME) == 1

    class Taken(GPipe):
        pass

    with pytest.raises(InputError, match="there is a schedule 'gpipe' already"):
        planner.register_schedule(Taken())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "is no Python file"),
        ("x = 1", "registers no schedule"),
        ("1 / 0", "fails: ZeroDivisionError"),
    ],
)
def test_files_that_register_nothing(
    content: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["show", "--schedule-from", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_plan_under_an_unknown_schedule_says_where_it_comes_from(
    schedule: Schedule, profile: Profile, tmp_path: Path
) -> None:
    cluster = planner.flat_cluster(2, "1Gbps")
    path = tmp_path / "plan.json"
    planner.save_plan(
        planner.price(profile, cluster, 2, replicas=1, schedule=NAME, microbatches=2), path
    )
    registry._registered.clear()
    registry.NAMES.remove(NAME)
    with pytest.raises(planner.PlannerError, match="a file that `schedule_from` names"):
        planner.load_plan(path)
