"""Checkpoints as people use them: stop, go on, on fewer workers, after a crash, with a full
disk.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import planner
from planner.cli.main import main
from planner.executor.checkpoint.folder_lock import LOCK
from planner.executor.checkpoint.folders import complete, load_checkpoint
from planner.formats.plan import save_plan
from planner.formats.profile import save_profile
from planner.model.spec import load_model_file
from tests.cli import in_process
from tests.cli.test_train import assert_one_sentence, is_alive
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 240
# Dropout, BatchNorm, AdamW, a learning rate that falls, and an order of the data that matters.
MODEL = """
import torch
from torch import nn

def build_model():
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Linear(12, 64), *blocks, nn.Linear(64, 3))

def example_batch(batch_size):
    return (torch.randn(batch_size, 12),), torch.randint(0, 3, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)

class Points(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(38, 12, generator=generator)
        self.y = self.x[:, :3].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return (self.x[index],), self.y[index]

def dataset():
    return Points()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file, its profile, plans for three and two workers, and one for another model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    profile = structural_profile(folder / "model.py", 4)
    save_profile(profile, folder / "profile.json")
    save_plan(make_plan(profile, (1, 1, 1)), folder / "three.json")
    save_plan(make_plan(profile, (1, 1)), folder / "two.json")
    save_plan(
        make_plan(structural_profile(write_model(folder, "language", "sgd"), 4), (1, 1)),
        folder / "other.json",
    )
    return folder


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `plan` in `folder`."""
    return in_process.plan(*arguments, cwd=folder)


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def losses(process: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert process.returncode == 0, process.stderr
    return {entry["minibatch"]: entry["loss"] for entry in json.loads(process.stdout)["losses"]}


@pytest.mark.slow
def test_with_a_worker_less_one_solves_again_and_goes_on(folder: Path) -> None:
    """Three workers, then two, over the end of an epoch, whose last minibatch is smaller; then the
    unsplit model.
    """
    run = (
        "train",
        "model.py",
        "--checkpoint-every",
        "4",
        "--checkpoint-folder",
        "smaller",
        "--keep",
        "2",
        "--json",
    )
    first = plan(folder, *run, "--plan", "three.json", "--steps", "8", "--seed", "5")
    assert list(losses(first)) == list(range(8))
    solved = plan(folder, "solve", "--gpus", "2", "--bandwidth", "1Gbps", "-o", "fewer.json")
    assert solved.returncode == 0, solved.stderr
    second = plan(
        folder,
        *run,
        "--plan",
        "fewer.json",
        "--epochs",
        "2",
        "--resume",
        "--save-weights",
        "weights.pt",
    )
    assert list(losses(second)) == list(range(8, 20))
    result = json.loads(second.stdout)
    assert result["resumed_from"] == "smaller/step-00000008"
    assert result["checkpoint"] == "smaller/step-00000020"
    assert [path.name for path in complete(folder / "smaller")] == [
        "step-00000016",
        "step-00000020",
    ]
    index = load_checkpoint(folder / "smaller" / "step-00000020").index
    assert (index.seed, index.minibatches_per_epoch) == (5, 10)
    rates = {
        group.hyperparameters["lr"]
        for part in index.parts
        if part.optimizer
        for group in part.optimizer.groups
    }
    assert list(rates) == [pytest.approx(0.02 * 0.7**6)]
    saved = torch.load(folder / "weights.pt", weights_only=True)
    for path in ("smaller", "weights.pt"):
        model = load_model_file(folder / "model.py").build_model()
        planner.load_weights(model, folder / path)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), (path, name)


def test_wrong_input_is_told_before_any_worker_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert (
            main(
                ["train", str(folder / "model.py"), "--plan", str(folder / "two.json"), *arguments]
            )
            == 2
        )
        return capsys.readouterr().err

    made = folder / "made"
    (made / "step-00000005").mkdir(parents=True)
    assert "there is no checkpoint 'nowhere'" in refused("--resume", "nowhere")
    assert "there is no checkpoint" in refused("--resume", str(folder / "model.py"))
    assert "there is no file" in refused("--resume", str(made))
    assert "has checkpoints of an earlier run" in refused(
        "--checkpoint-every", "5", "--checkpoint-folder", str(made)
    )
    assert "is a file, not a folder" in refused(
        "--checkpoint-every", "5", "--checkpoint-folder", str(folder / "model.py")
    )
    assert "--checkpoint-every 0 is too small" in refused("--checkpoint-every", "0")
    assert "--keep 0 is too small" in refused("--keep", "0")
    assert "argument --checkpoint-every: invalid" in refused("--checkpoint-every", "often")
    assert "checkpoints are of plans" in refused(
        "--checkpoint-every", "5", "--baseline", "data-parallel"
    )


def test_as_many_minibatches_of_other_samples_are_refused(folder: Path) -> None:
    """Of 38 samples and of 39 an epoch has ten minibatches, in other orders."""
    for samples in (38, 39):
        (folder / f"{samples}.py").write_text(MODEL.replace("38", str(samples)), encoding="utf-8")
    common = ("--plan", "two.json", "--checkpoint-folder", "samples", "--resume", "--steps")
    first = plan(folder, "train", "38.py", *common, "2", "--checkpoint-every", "2")
    assert first.returncode == 0, first.stderr
    index = load_checkpoint(complete(folder / "samples")[-1]).index
    assert (index.samples, index.order, index.fed) == (38, None, False)
    assert_one_sentence(
        plan(folder, "train", "39.py", *common, "4"), 2, "dataset() has 39 samples, but had 38 in"
    )


@pytest.mark.slow
def test_another_model_or_seed_or_a_shorter_run_is_refused(folder: Path) -> None:
    common = ("train", "model.py", "--plan", "two.json", "--checkpoint-folder", "refused")
    assert plan(folder, *common, "--steps", "6", "--checkpoint-every", "3").returncode == 0
    assert_one_sentence(
        plan(folder, *common, "--resume", "--seed", "1"), 2, "of a run with seed 0, not 1"
    )
    assert_one_sentence(
        plan(folder, *common, "--resume", "--steps", "3"), 2, "of a run of 6 minibatches", "have 3"
    )
    other = plan(folder, "train", "language_sgd.py", "--plan", "other.json", "--resume", "refused")
    assert_one_sentence(other, 2, "is of another model")
    done = plan(folder, *common, "--resume", "--steps", "6")
    assert done.returncode == 0
    assert "No minibatch was left to train" in done.stdout
    file = next((folder / "refused" / "step-00000006").glob("*.optimizer.*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert_one_sentence(
        plan(folder, *common, "--resume", "--steps", "9"), 2, "is corrupt", file.name
    )


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(folder: Path) -> None:
    """SIGKILL to everything at random moments, with a checkpoint after every minibatch."""
    rng = random.Random(4)
    common = [
        "train",
        "model.py",
        "--plan",
        "two.json",
        "--steps",
        "400",
        "--checkpoint-every",
        "2",
        "--keep",
        "2",
    ]
    kills = 0
    while kills < 6:
        process = subprocess.Popen(
            [sys.executable, "-m", "planner", *common, "--checkpoint-folder", "killed", "--resume"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        newest = complete(folder / "killed")[-1:]
        while process.poll() is None and complete(folder / "killed")[-1:] == newest:
            time.sleep(0.01)
        time.sleep(rng.random() / 2)
        if process.poll() is not None:
            break
        workers = children(process.pid)
        for pid in (*workers, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(30)
        deadline = time.monotonic() + 30
        while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        kills += 1
        for path in complete(folder / "killed"):
            planner.load_weights(load_model_file(folder / "model.py").build_model(), path)
    assert kills
    last = plan(folder, *common, "--checkpoint-folder", "killed", "--resume", "--json")
    whole = plan(folder, *common, "--checkpoint-folder", "whole", "--json")
    tail = losses(last)
    assert tail == {
        minibatch: loss for minibatch, loss in losses(whole).items() if minibatch in tail
    }
    one, other = (planner.load_weights for _ in range(2))
    models = [load_model_file(folder / "model.py").build_model() for _ in range(2)]
    one(models[0], folder / "killed")
    other(models[1], folder / "whole")
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    assert {path.name for path in (folder / "killed").glob(".*")} <= {LOCK}


@pytest.mark.slow
def test_a_disk_that_takes_no_more_stops_no_training(folder: Path) -> None:
    """A limit on the size of files stands for the full disk: the weights fit, the optimizer's state
    does not.
    """
    common = (
        "train",
        "model.py",
        "--plan",
        "two.json",
        "--checkpoint-every",
        "3",
        "--checkpoint-folder",
        "full",
    )
    assert plan(folder, *common, "--steps", "3").returncode == 0
    limited = subprocess.run(
        [sys.executable, "-m", "planner", *common, "--steps", "9", "--resume"],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )  # fmt: skip
    assert limited.returncode == 1, limited.stderr
    for minibatch in (6, 9):
        assert (
            f"warning: the checkpoint after minibatch {minibatch} could not be written to 'full'"
            in limited.stderr
        )
    assert "error: " in limited.stderr
    assert "the last checkpoint could not be written" in limited.stderr
    assert sorted(path.name for path in (folder / "full").iterdir()) == [
        ".lock",
        "losses.jsonl",
        "step-00000003",
    ]
    assert plan(folder, *common, "--steps", "9", "--resume").returncode == 0


@pytest.mark.slow
def test_a_file_system_that_is_full_stops_no_training_either(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same on a small file system of its own, which has room for one checkpoint and a half."""
    small = folder / "small"
    common = (
        "train",
        "model.py",
        "--plan",
        "two.json",
        "--checkpoint-every",
        "3",
        "--checkpoint-folder",
        "small",
    )
    assert plan(folder, *common, "--steps", "3").returncode == 0
    whole = sum(path.stat().st_size for path in small.rglob("*"))
    shutil.rmtree(small)
    small.mkdir()
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={whole * 3 // 2 + (1 << 15)}",
        "small",
        str(small),
    ]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        done = plan(folder, *common, "--steps", "9")
        assert done.returncode == 1, done.stderr
        warnings = capfd.readouterr().err  # of the workers, which are processes
        for minibatch in (6, 9):
            place = f"the checkpoint after minibatch {minibatch} could not be written to 'small'"
            assert f"warning: {place} (worker" in warnings
        assert "No space left on device" in done.stderr
        assert sorted(path.name for path in small.iterdir()) == [
            ".lock",
            "losses.jsonl",
            "step-00000003",
        ]
        planner.load_weights(load_model_file(folder / "model.py").build_model(), small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


# What a worker of another host sees on NFS: it remembers for a while that a file was missing, and a
# file that another host has open cannot be removed.
NFS = """
import errno, os, time

_stat, _unlink, _remembered = os.stat, os.unlink, {}

def stat(path, **options):
    if os.environ.get("RANK") == "1" and ".step-sign" in str(path):
        if time.monotonic() < _remembered.setdefault(str(path), time.monotonic() + 1.0):
            raise FileNotFoundError(errno.ENOENT, "as it was", str(path))
    return _stat(path, **options)

def unlink(path, **options):
    if str(path).startswith(".nfs"):
        raise OSError(errno.EBUSY, "Device or resource busy", path)
    return _unlink(path, **options)

os.stat, os.unlink = stat, unlink

def on_update(minibatch, loss, metrics):
    for folder in ("nfs/step-00000004", "nfs/.step-00000004.removed"):
        if minibatch in (6, 7, 8, 9, 10, 11) and os.path.isdir(folder):
            open(folder + "/.nfs0001", "w").close()
"""


@pytest.mark.slow
def test_nfs_may_show_a_folder_late_and_keep_a_removed_one(folder: Path) -> None:
    (folder / "on_nfs.py").write_text(MODEL + NFS, encoding="utf-8")
    options = ("--checkpoint-every", "4", "--checkpoint-folder", "nfs", "--keep", "1", "--json")
    done = plan(folder, "train", "on_nfs.py", "--plan", "two.json", "--steps", "12", *options)
    assert len(losses(done)) == 12
    assert "could not be written" not in done.stderr
    assert json.loads(done.stdout)["checkpoint"] == "nfs/step-00000012"
    names = {path.name for path in (folder / "nfs").iterdir()}
    assert names == {".lock", "losses.jsonl", "step-00000012", ".step-00000004.removed"}
    # The next run removes what is left.
    (folder / "nfs" / ".step-00000004.removed" / ".nfs0001").rename(
        folder / "nfs" / ".step-00000004.removed" / "free"
    )
    again = plan(
        folder, "train", "on_nfs.py", "--plan", "two.json", "--steps", "16", "--resume", *options
    )
    assert len(losses(again)) == 4
    assert {path.name for path in (folder / "nfs").iterdir()} == {
        ".lock",
        "losses.jsonl",
        "step-00000016",
    }
