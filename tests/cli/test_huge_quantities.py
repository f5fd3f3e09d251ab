"""Quantities beyond all sense are one sentence with a hint, whatever they would overflow."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.errors import InputError
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.samples import layer, profile

TWO_LAYERS = profile(
    layer("one", 0.1, 0.2, output_bytes=4000, weight_bytes=8000),
    layer("two", 0.1, 0.2, weight_bytes=8000),
)
TWO_GPUS = ("solve", "--gpus", "2", "--bandwidth", "1Gbps")


@pytest.mark.parametrize(
    "arguments",
    [
        (*TWO_GPUS, "--latency", "1e15s"),
        (*TWO_GPUS, "--memory", "1e30GB"),
        (*TWO_GPUS, "--minibatch", "2e18"),
        (*TWO_GPUS, "--minibatch", "2000000000000000000"),
        (*TWO_GPUS, "--schedule", "gpipe", "--microbatches", "99999999999999"),
        ("solve", "--gpus", "2", "--bandwidth", "1e-300bps"),
        ("solve", "--gpus", "2", "--bandwidth", "1e300bps"),
        ("solve", "--gpus", "9" * 25, "--bandwidth", "1Gbps"),
        ("price", "--stages", "2", "--gpus", "2", "--bandwidth", "1Gbps", "--latency", "1e15s"),
    ],
    ids=" ".join,
)
def test_a_huge_quantity_is_a_sentence(arguments: tuple[str, ...], tmp_path: Path) -> None:
    save_profile(TWO_LAYERS, tmp_path / "profile.json")
    done = plan(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert "bug" not in hint


def test_python_users_get_the_same_sentence() -> None:
    with pytest.raises(InputError, match="the answer has a number that cannot be") as error:
        planner.solve(
            TWO_LAYERS,
            planner.flat_cluster(2, "1Gbps", latency_s=1e15),
            max_stages=2,
            schedule="gpipe",
        )
    assert "far too large" in error.value.hint
