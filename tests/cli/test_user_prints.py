"""What a user's code prints goes to stderr, and stdout has the answer alone: in all processes, from
Python and C.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.formats.plan import save_plan
from tests.executor.plans import make_plan, structural_profile

PRINTING = """
import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

def say(place):
    print(f"printed in {place}")
    sys.__stdout__.write(f"written in {place}\\n")
    os.write(1, f"written by the system in {place}\\n".encode())

say("the module")

class Net(nn.Sequential):
    def forward(self, x):
        say("forward")
        return super().forward(x)

def build_model():
    say("build_model")
    return Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def example_batch(batch_size):
    say("example_batch")
    return (torch.randn(batch_size, 4),), torch.randn(batch_size, 1)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    say("optimizer")
    return torch.optim.SGD(parameters, lr=0.1)

class Data(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        say("an item")
        return (torch.ones(4),), torch.ones(1)

def dataset():
    say("dataset")
    return Data()

def on_update(minibatch, loss, metrics):
    say("on_update")
    with open("streams", "w") as file:
        file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


OTHER = ["-o", "other.json", "--json"]


def _own_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a verb in a process of its own, whose stdout is that of the system."""
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file and a plan "1-1" for it."""
    folder = tmp_path_factory.mktemp("printing")
    (folder / "model.py").write_text(PRINTING, encoding="utf-8")
    profile = structural_profile(folder / "model.py", 4)
    save_plan(make_plan(profile, (1, 1), "1f1b-flush", 2), folder / "plan.json")
    return folder


def assert_alone(code: int, stdout: str, stderr: str, places: Sequence[str]) -> None:
    """The answer is all of stdout, and what the places print is on stderr."""
    answer = json.loads(stdout)
    assert ("error" in answer) == (code != 0), stderr
    for place in places:
        assert f"printed in {place}" in stderr
        assert f"written in {place}" in stderr
        assert f"written by the system in {place}" in stderr


def test_the_answer_of_workers_is_alone_on_stdout(folder: Path) -> None:
    """Where stdin is closed, it leads nowhere for them."""
    shell = f"{sys.executable} -m planner train model.py --steps 2 --json <&-"
    done = subprocess.run(
        shell, cwd=folder, capture_output=True, text=True, timeout=240, shell=True
    )
    assert done.returncode == 0, done.stderr
    stdin, stdout, stderr = (folder / "streams").read_text("utf-8").split()
    assert stdin == os.devnull
    assert stdout == stderr, "while `plan` runs, stdout leads to stderr"
    places = ["the module", "dataset", "an item", "on_update"]
    assert_alone(done.returncode, done.stdout, done.stderr, places)


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (["profile", "model.py", "--batch-size", "4", "--seconds", "0", *OTHER], ["forward"]),
        (
            ["profile", "model.py", "--estimate", "--device", "a100", "--batch-size", "4", *OTHER],
            ["forward"],
        ),
        (["fit", "model.py", "--gpus", "2", "--json", "--output", "fitted"], ["forward"]),
        (["train", "missing.py", "--json"], []),
    ],
    ids=["profile", "estimate", "fit", "error"],
)
def test_the_answer_is_alone_on_stdout(
    arguments: Sequence[str],
    places: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process, whose descriptors lead to files for as long."""
    streams = {
        "stdout": os.fdopen(1, "w", closefd=False),
        "stderr": os.fdopen(2, "w", closefd=False),
    }
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
            patch.setattr(sys, f"__{name}__", stream)
        code = main(arguments)
        for stream in streams.values():
            stream.close()
    out, err = capfd.readouterr()
    assert_alone(code, out, err, places)


@pytest.mark.slow
def test_the_answer_of_hosts_that_may_be_lost_is_alone_on_stdout_too(folder: Path) -> None:
    """The worker that answers is started by a verb, which keeps its own stdout apart."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    elastic = ["--elastic", "1:1", "--rendezvous", place, "--copy-folder", str(folder)]
    arguments = ("train", "model.py", "--steps", "2", "--json", *elastic)
    done = _own_process(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["minibatches"] == 2
    assert "printed in on_update" in done.stderr


def test_who_reads_the_answer_may_leave(folder: Path) -> None:
    """As `plan show | head -1` does."""
    command = f"{sys.executable} -m planner show | head -c 1"
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, shell=True
    )
    assert len(done.stdout) == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
