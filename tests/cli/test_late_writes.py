"""A disk that is full when the work is done: the answer is printed all the same, and then what is
missing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.formats.plan import save_plan
from tests.cli.in_process import plan
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import _warm
from tests.small_disk import small_disk

TIMEOUT_S = 200
STEPS = 6
PROFILE = Path(__file__).parents[2] / "profiles" / "vgg16" / "cpu.json"
# enough for the file that is tried out beforehand, and for no plan or profile
ROOM_BYTES = 4096

# Fills the disk that FULL names, at the last update.
FILLS = f"""
import os

def on_update(minibatch, loss, metrics):
    if minibatch < {STEPS - 1}:
        return
    try:
        with open(os.path.join(os.environ["FULL"], "filler"), "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        pass
"""

pytestmark = [pytest.mark.timeout(2 * TIMEOUT_S), pytest.mark.usefixtures("warm_start")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model file, a plan "1-1" for it, and a profile."""
    path = write_model(tmp_path, "convolutional", "sgd", more=FILLS).rename(tmp_path / "model.py")
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), tmp_path / "plan.json")
    shutil.copy(PROFILE, tmp_path / "profile.json")
    return tmp_path


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 4 MB, which the run fills at its end."""
    monkeypatch.setenv("FULL", "small")
    with small_disk(folder / "small", 1 << 22) as disk:
        yield disk


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `plan train`, which launches workers."""
    return plan("train", "model.py", "--steps", str(STEPS), "--json", *arguments, cwd=folder)


def train_in_own_process(
    folder: Path, *arguments: str, launcher: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        *launcher,
        "planner",
        "train",
        "model.py",
        "--steps",
        str(STEPS),
        "--json",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path.cwd()),
        **variables,
    }
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def assert_result(done: subprocess.CompletedProcess[str], code: int, *missing: str) -> None:
    """The whole result on stdout, the exit code, and one sentence with a hint where something is
    missing.
    """
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert [entry["minibatch"] for entry in result["losses"]] == list(range(STEPS))
    assert done.returncode == code, done.stderr
    assert "planner/" not in done.stderr.partition("Traceback")[2], "torchrun's own, at most"
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "warning: "))]
    assert len(lines) == bool(missing), done.stderr
    for part in missing:
        assert part in lines[0]
    assert len(result["late_failures"]) == len(lines)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """What sets the folder for temporary files."""
    _warm()  # has one of its own, which outlives the test

    def temporary(folder: Path) -> None:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)

    return temporary


@pytest.mark.usefixtures("disk")
def test_a_trace_that_finds_no_room(folder: Path) -> None:
    done = train(folder, "--trace", "small/run.json")
    assert_result(done, 1, "error: 'small/run.json' cannot be written: No space left on device")


@pytest.mark.slow
@pytest.mark.usefixtures("disk")
def test_a_trace_that_finds_no_room_under_torchrun(folder: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    done = train_in_own_process(folder, "--trace", "small/run.json", launcher=launcher)
    assert_result(done, 1, "error: 'small/run.json' cannot be written: No space left on device")


def test_a_full_folder_for_temporary_files_costs_nothing(
    folder: Path, disk: Path, temporary: Callable[[Path], None]
) -> None:
    temporary(disk)
    assert_result(train(folder), 0)


@pytest.mark.slow
def test_a_trace_that_finds_no_room_on_its_way(
    folder: Path, disk: Path, temporary: Callable[[Path], None]
) -> None:
    temporary(disk)
    done = train(folder, "--trace", "run.json")
    assert_result(done, 1, "error: there is no trace", "No space left on device")


@pytest.mark.usefixtures("disk")
def test_weights_are_rescued_and_the_result_is_printed(
    folder: Path, temporary: Callable[[Path], None]
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    temporary(elsewhere)
    done = train(folder, "--save-weights", "small/weights.pt")
    assert_result(
        done,
        1,
        "error: the weights cannot be written to 'small/weights.pt'",
        f"they are in '{elsewhere}/",
    )
    assert json.loads(done.stdout)["saved_weights"] is None
    assert list(elsewhere.glob("weights-*.pt"))


@pytest.mark.usefixtures("disk")
@pytest.mark.slow
def test_the_last_checkpoint_finds_no_room(folder: Path) -> None:
    fill = (
        (folder / "model.py")
        .read_text(encoding="utf-8")
        .replace(f"minibatch < {STEPS - 1}", f"minibatch < {STEPS - 2}")
    )
    (folder / "model.py").write_text(fill, encoding="utf-8")
    done = train(folder, "--checkpoint-every", "3", "--checkpoint-folder", "small/checkpoints")
    result = json.loads(done.stdout)
    assert [entry["minibatch"] for entry in result["losses"]] == list(range(STEPS))
    assert done.returncode == 1
    assert "error: the last checkpoint could not be written to 'small/checkpoints'" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("disk")
def test_an_elastic_run_is_not_started_again_for_a_trace(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    elastic = (
        "--elastic",
        "1:1",
        "--rendezvous",
        f"127.0.0.1:{port}",
        "--copy-folder",
        str(folder / "copies"),
    )
    arguments = ("--trace", "small/run.json", *elastic)
    done = train_in_own_process(folder, *arguments, HOME=str(folder))
    assert_result(done, 1, "error: 'small/run.json' cannot be written: No space left on device")


CLUSTER = ("--gpus", "4", "--bandwidth", "1Gbps")
VERBS = {
    "solve": ("solve", *CLUSTER, "--output", "small/plan.json"),
    "price": ("price", *CLUSTER, "--stages", "4", "--output", "small/plan.json"),
    "simulate": (
        "simulate",
        "--plan",
        "plan.json",
        "--trace",
        "small/trace.json",
        "--minibatches",
        "50",
    ),
    "profile": (
        "profile",
        "model.py",
        "--batch-size",
        "8",
        "--estimate",
        "--output",
        "small/profile.json",
    ),
    "fit": ("fit", "model.py", "--gpus", "2", "--batch-size", "8", "--output", "small"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_prints_its_answer_first(verb: str, folder: Path) -> None:
    with small_disk(folder / "small", ROOM_BYTES):
        done = plan(*VERBS[verb], "--json", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout).keys() > {"error"} or "error" not in json.loads(done.stdout)
    assert "cannot be written: No space left on device" in done.stderr


def test_a_file_is_written_although_nobody_reads_the_answer(folder: Path) -> None:
    """As in `plan solve | head -0`."""
    verbs = {"plan.json": VERBS["solve"], "trace.json": VERBS["simulate"]}
    (folder / "small").mkdir()
    for name, arguments in verbs.items():
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "planner", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        os.close(writer)
        assert done.returncode == 1, name
        assert "Traceback" not in done.stderr
        assert (folder / "small" / name).exists(), done.stderr
