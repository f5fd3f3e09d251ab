"""`--precision` and `--stack` of `plan fit` and `plan profile --estimate` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.in_process import plan
from tests.cli.test_profile import MODEL

ESTIMATE = ("profile", "model.py", "--estimate", "--device", "h100", "--batch-size", "16")
MASTERS = ("--dtype", "bfloat16", "--master-weights")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_a_profile_says_its_stack_and_its_precision(folder: Path) -> None:
    options = ("--stack", "megatron", "--precision", "fp8", *MASTERS)
    made = plan(*ESTIMATE, *options, "--json", cwd=folder)
    assert made.returncode == 0, made.stderr
    content = json.loads(made.stdout)
    assert (content["stack"], content["products"]) == ("megatron", "fp8")
    shown = plan("show", "profile.json", cwd=folder).stdout
    assert "products in fp8" in shown
    assert "kernels of the megatron stack" in shown


@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        ((*MASTERS, "--precision", "int8"), "'int8' is no format of products", "fp8, mxfp8"),
        ((*MASTERS, "--precision", "mxfp8"), "has no products in mxfp8", "--precision fp8"),
        (("--precision", "fp8"), "with weights in half precision and masters", "--master-weights"),
        (("--stack", "compiled", "--compile"), "both say what is fused", "leave out one"),
    ],
)
def test_what_contradicts_itself_is_refused(
    folder: Path, arguments: tuple[str, ...], complaint: str, hint: str
) -> None:
    refused = plan(*ESTIMATE, *arguments, cwd=folder)
    assert refused.returncode == 2
    assert complaint in refused.stderr
    assert hint in refused.stderr


def test_an_answer_says_what_train_does_not_run(folder: Path) -> None:
    asked = ("fit", "model.py", "--gpus", "2", "--gpu", "h100", "--batch-size", "16")
    plain = plan(*asked, "--minibatch", "64", cwd=folder)
    assert plain.returncode == 0, plain.stderr
    assert "stack" not in plain.stdout

    made = plan(*asked, "--minibatch", "64", "--stack", "compiled", cwd=folder)
    assert made.returncode == 0, made.stderr
    assert "these numbers are for kernels of the compiled stack" in made.stdout
    assert "For its numbers, estimate with --stack eager" in made.stdout

    narrow = plan(*asked, "--minibatch", "64", "--precision", "fp8", cwd=folder)
    assert narrow.returncode == 0, narrow.stderr
    assert "products in fp8" in narrow.stdout
    assert "plan train" not in narrow.stderr
    refused = plan("train", "model.py", "--steps", "1", cwd=folder)
    assert refused.returncode == 2
    assert "the plan is for products in fp8" in refused.stderr


@pytest.mark.parametrize("verb", [("solve",), ("price", "--stages", "2")])
def test_so_do_answers_from_a_profile_with_a_stack(folder: Path, verb: tuple[str, ...]) -> None:
    """Such a profile is what `plan fit` leaves, and its plans are trained, too."""
    assert plan(*ESTIMATE, "--stack", "compiled", cwd=folder).returncode == 0
    asked = (*verb, "--gpus", "2", "--bandwidth", "100GB/s", "--schedule", "1f1b-flush")
    made = plan(*asked, "--json", cwd=folder)
    assert made.returncode == 0, made.stderr
    content = json.loads(made.stdout)
    shards_weights = content["stages"][0].get("sharding_level", 0) >= 2
    assert content["compiled"] != shards_weights
    assert any(
        "these numbers are for kernels of the compiled stack" in note for note in content["notes"]
    )
