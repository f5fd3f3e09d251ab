"""A FIFO, a socket, an endless device or a folder in place of a file: a sentence at once, from
whatever reads it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.executor.checkpoint.folders import load_checkpoint
from planner.executor.checkpoint.pretrained import Pretrained
from planner.executor.checkpoint.tensor_file import TensorFile, each_tensor, opened
from planner.executor.checkpoint.trained_weights import read_trained
from planner.executor.observe.run_log import FILE, is_of
from planner.exports.settings import text_of
from planner.formats.files import write_text
from planner.model.spec import load_model_file
from planner.reporting.trace import load_run
from tests.cli.in_process import plan

pytestmark = pytest.mark.timeout(240)  # a FIFO that is opened waits for ever

PROFILE = Path(__file__).parents[2] / "profiles" / "vgg16" / "cpu.json"
KINDS = {
    "fifo": "it is a FIFO, and no file",
    "socket": "it is a socket, and no file",
    "zero": "it is a device",
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with one irregular file of each kind; its path is short, as those of sockets must
    be.
    """
    folder = Path(f"/tmp/irregular-{os.getpid()}")
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        yield folder
    shutil.rmtree(folder)


TRAIN = ["train", "model.py", "--plan", "plan.json", "--steps", "2"]
ELASTIC = [*TRAIN, "--elastic", "1:1", "--rendezvous", "127.0.0.1:29871"]
VERBS = {
    "show": ["show", "{}"],
    "simulate": ["simulate", "--plan", "{}"],
    "against": ["simulate", "--plan", "plan.json", "--against", "{}"],
    "run": ["report", "--plan", "plan.json", "--run", "{}"],
    "solve": ["solve", "--profile", "{}", "--gpus", "2", "--bandwidth", "1GB/s"],
    "kinds": [
        "solve",
        "--profile",
        "a={},b={}",
        "--gpus",
        "2",
        "--kinds",
        "a=1,b=1",
        "--bandwidth",
        "1GB/s",
    ],
    "cluster": ["solve", "--profile", "profile.json", "--cluster", "{}"],
    "explain": ["explain", "--plan", "plan.json", "--profile", "{}"],
    "compare": ["compare", "--plan", "{}", "--profile", "profile.json"],
    "price": ["price", "--profile", "{}", "--gpus", "2", "--bandwidth", "1GB/s", "--stages", "1,2"],
    "report": ["report", "--plan", "{}"],
    "export": ["export", "--to", "megatron", "--plan", "{}"],
    "train": ["train", "model.py", "--plan", "{}"],
    "model": ["profile", "{}"],
    "model to train": ["train", "{}", "--plan", "plan.json"],
    "device": ["profile", "model.py", "--estimate", "--device-file", "{}"],
    "fit": ["fit", "{}", "--gpus", "2"],
    "run of a trainer": ["fit", "model.py", "--gpus", "2", "--torchtitan", "{}"],
    "output": [
        "solve",
        "--profile",
        "profile.json",
        "--gpus",
        "2",
        "--bandwidth",
        "1GB/s",
        "-o",
        "{}",
    ],
    "trace": ["simulate", "--plan", "plan.json", "--trace", "{}"],
    "priced": ["price", "--gpus", "2", "--bandwidth", "1GB/s", "--stages", "2", "-o", "{}"],
    "profiled": ["profile", "model.py", "--estimate", "-o", "{}"],
    "exported": ["export", "--to", "megatron", "--plan", "plan.json", "-o", "{}"],
    "page": ["report", "--plan", "plan.json", "-o", "{}"],
    "weights": [*TRAIN, "--save-weights", "{}"],
    "trace of a run": [*TRAIN, "--trace", "{}"],
}
# What may be a folder, or is to be one.
FOLDERS = {
    "folder to work in": ["quickstart", "-o", "{}"],
    "checkpoints": [*TRAIN, "--checkpoint-every", "2", "--checkpoint-folder", "{}"],
    "resume": [*TRAIN, "--checkpoint-every", "2", "--resume", "{}"],
    "folder of an answer": ["fit", "model.py", "--gpus", "2", "-o", "{}"],
    "configuration": ["fit", "{}/config.json", "--gpus", "2"],
    "copies": [*ELASTIC, "--copy-folder", "{}"],
    "secret": [*ELASTIC, "--secret-file", "{}"],
}


@pytest.mark.parametrize("kind", [*KINDS, "folder"])
def test_every_verb_ends_with_a_sentence(kind: str, folder: Path) -> None:
    shutil.copy(PROFILE, folder / "profile.json")
    shutil.copy(PROFILE.parents[1] / "vgg16" / "model.py", folder / "model.py")
    solved = plan("solve", "--gpus", "2", "--bandwidth", "1GB/s", cwd=folder)
    assert solved.returncode == 0, solved.stderr
    before = (folder / kind).stat()
    for name, arguments in (VERBS if kind == "folder" else VERBS | FOLDERS).items():
        done = plan(*(argument.format(kind, kind) for argument in arguments), cwd=folder)
        assert done.returncode in (1, 2), (name, done.stdout)
        assert re.search(rf"'{kind}['/]", done.stderr), (name, done.stderr)
        assert "bug in plan" not in done.stderr, (name, done.stderr)
    assert (folder / kind).stat().st_mode == before.st_mode, "nothing was written in its place"


def _expected(path: Path) -> TensorFile:
    return TensorFile(name=path.name, size_bytes=1, sha256="", tensors=())


def _opened(path: Path) -> None:
    with opened(path, _expected(path)):
        pass


READERS: dict[str, Callable[[Path], object]] = {
    "run": load_run,
    "tensors": lambda path: list(each_tensor(path)),
    "tensors that were written": _opened,
    "weights": read_trained,
    "model file": load_model_file,
    "trainer's file": text_of,
    "written": lambda path: write_text(path, "text"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_ends_with_a_sentence(reader: str, kind: str, folder: Path) -> None:
    with pytest.raises(PlannerError, match=str(folder / kind)):
        READERS[reader](folder / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_checkpoints(kind: str, folder: Path) -> None:
    for name in ("index.json", "model.safetensors.index.json", "model.safetensors", FILE):
        (folder / name).symlink_to(folder / kind)
    with pytest.raises(PlannerError, match=KINDS[kind]):
        load_checkpoint(folder)
    assert not is_of(folder, "run")
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises(PlannerError):
            Pretrained(source, None)
