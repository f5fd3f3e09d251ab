"""`plan profile` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner
from tests.cli.in_process import plan

MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def example_batch(batch_size):
    return (torch.randn(batch_size, 8),), torch.randint(0, 4, (batch_size,))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_a_profile_is_made_shown_and_solved(folder: Path) -> None:
    short = ("--batch-size", "4", "--seconds", "0.1")
    made = plan("profile", "model.py", *short, "--json", cwd=folder)
    assert made.returncode == 0, made.stderr
    # Where nobody watches, a line per phase in place of one that is rewritten.
    assert made.stderr.startswith("capturing ...\nmeasuring ...\n")
    assert made.stderr.endswith("written to profile.json\n")
    content = json.loads(made.stdout)
    assert content["microbatch_size"] == 4
    assert [layer["op"] for layer in content["layers"][:3]] == ["Linear", "ReLU", "Linear"]
    assert planner.load_profile(folder / "profile.json").digest
    assert "sum of layers" in plan("show", "profile.json", cwd=folder).stdout
    solved = plan("solve", "--gpus", "2", "--bandwidth", "10Gbps", "--json", cwd=folder)
    assert json.loads(solved.stdout)["graph_hash"] == content["graph_hash"]


def test_profiles_of_several_batch_sizes_make_the_same_minibatch(folder: Path) -> None:
    """Whose plans a loop over them compares, by the samples per second."""
    for size in ("4", "8"):
        arguments = ("--batch-size", size, "--seconds", "0", "-o", f"profile-b{size}.json")
        made = plan("profile", "model.py", *arguments, cwd=folder)
        assert made.returncode == 0, made.stderr
        asked = (
            "--profile",
            f"profile-b{size}.json",
            "--schedule",
            "1f1b-flush",
            "--minibatch",
            "32",
        )
        solved = plan("solve", "--gpus", "2", "--bandwidth", "10Gbps", *asked, "--json", cwd=folder)
        found = json.loads(solved.stdout)
        assert found["microbatches"] * found["microbatch_size"] == 32
        assert found["predicted"]["samples_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.py",), "there is no model file 'none.py'"),
        (("model.py:other",), "other"),
        (("model.py", "--batch-size", "0"), "--batch-size 0"),
        (("model.py", "--batch-size", "4,x"), "'4,x'"),
        (("model.py", "--device", "tpu"), "--device tpu is no kind of device: PyTorch offers"),
    ],
)
def test_wrong_input(folder: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = plan("profile", *arguments, cwd=folder)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "profile.json").exists()


def test_a_profile_of_another_model_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "other.py").write_text(MODEL)
    short = ("--batch-size", "4", "--seconds", "0")
    assert plan("profile", "model.py", *short, cwd=folder).returncode == 0
    first = (folder / "profile.json").read_text()
    assert plan("profile", "other.py", *short, cwd=folder).returncode == 0
    kept = folder / f"profile-{folder.name}-measured.json"
    assert (
        f"profile.json was the measured profile of '{folder.name}': it is {kept.name} now"
        in caplog.text
    )
    assert kept.read_text() == first
    assert planner.load_profile(folder / "profile.json").model == "other"
    assert plan("fit", "other.py", "--gpus", "2", cwd=folder).stderr.startswith(
        "estimating other.py ..."
    )
    assert (
        planner.load_profile(folder / "profile-other-measured.json").provenance.source == "measured"
    )
