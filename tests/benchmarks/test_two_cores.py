"""The benchmark's own machinery: tables, started workers, and the baselines' rates."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.testbed.two_cores import turns
from benchmarks.testbed.two_cores.launch import Loopback, RunError, last_object, places, run_workers
from benchmarks.testbed.two_cores.marks import Mark, rate, read_marks
from benchmarks.testbed.two_cores.table import Sample, Spread, ratios
from benchmarks.testbed.two_cores.turns import Contender, take_turns

MODELS = ("transformer", "vgg_like")
STEPPER = """
import os, time
file = os.open(os.environ["TWO_CORES_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
count = 0
while True:
    time.sleep(0.01)
    count += 1
    os.write(file, f"{time.monotonic_ns()} {count}\\n".encode())
"""


def cycles(contender: str, *rates: float) -> list[Sample]:
    """Samples of consecutive cycles on vgg_like over 1 Gbit/s."""
    return [
        Sample("vgg_like", "1gbit", "all", contender, cycle, rate)
        for cycle, rate in enumerate(rates)
    ]


def test_a_ratio_is_of_the_same_cycle_so_that_a_drift_cancels() -> None:
    samples = [*cycles("ours", 105.0, 210.0, 52.5), *cycles("theirs", 100.0, 200.0, 50.0, 70.0)]
    assert ratios(samples, "ours", "theirs") == pytest.approx([1.05, 1.05, 1.05])
    assert Spread.of(ratios(samples, "ours", "theirs")).text(".2f") == "1.05 (1.05 to 1.05)"
    elsewhere = [
        replace(sample, group="others") for sample in samples if sample.contender == "theirs"
    ]
    assert ratios([*samples[:3], *elsewhere], "ours", "theirs") == []


def test_marks_are_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    assert read_marks(path) == []
    path.write_text("1000000000 4\n2000000000 8\n4000000000 10\n45000")
    marks = read_marks(path, since_s=1.5)
    assert marks == [Mark(2.0, 8.0), Mark(4.0, 10.0)]
    assert rate(marks) == 1.0
    assert rate(marks[:1]) == 0.0


def test_contenders_run_in_their_turns_alone(tmp_path: Path) -> None:
    (tmp_path / "stepper.py").write_text(STEPPER)
    with patch.object(turns, "ROOT", tmp_path):
        contenders = [Contender(name, [Loopback()], ("stepper",), 10) for name in "ab"]
        windows = list(take_turns(contenders, tmp_path, until_s=0.0, window_s=0.2))
    assert [(window.contender, window.cycle) for window in windows] == [
        *[("a", 0), ("b", 0), ("b", 0), ("a", 0)],
        *[("a", 1), ("b", 1), ("b", 1), ("a", 1)],
    ]
    assert all(0 < window.samples_per_s < 1000 for window in windows)  # a step sleeps 0.01 s
    ends = {name: [mark.s for mark in read_marks(tmp_path / f"{name}.0.marks")] for name in "ab"}
    # While one was stopped, the other made steps: a gap of a in which b has many marks.
    gaps = [(x, y) for x, y in pairwise(ends["a"]) if sum(x < s < y for s in ends["b"]) > 5]
    assert gaps


def test_a_contender_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    broken = Contender(
        "broken", [Loopback()], ("benchmarks.testbed.two_cores.worker", "nonsense"), 8
    )
    with pytest.raises(RunError, match="invalid choice: 'nonsense'"):
        list(take_turns([broken], tmp_path, 0.0, 0.1))


@pytest.mark.parametrize(
    "text", ['{"a": 1}', 'gloo says hello\n{"a": 1}\n', 'hello\n{\n "a": 1\n}\n']
)
def test_the_result_is_found_behind_other_output(text: str) -> None:
    assert last_object(text) == {"a": 1}


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_the_contract(name: str) -> None:
    module = importlib.import_module(f"benchmarks.testbed.two_cores.{name}")
    model = module.build_model()
    args, target = module.example_batch(2)
    loss = module.loss(model(*args), target)
    loss.backward()
    assert torch.isfinite(loss)
    module.optimizer(model.parameters()).step()
    # A cut of the sequence is what the baselines of torch.distributed.pipelining are given.
    assert isinstance(model, torch.nn.Sequential)


def test_a_worker_that_fails_is_an_error_with_its_last_words() -> None:
    with pytest.raises(RunError, match="invalid choice: 'nonsense'"):
        run_workers([Loopback()], "benchmarks.testbed.two_cores.worker", ["nonsense"], timeout_s=60)


def test_workers_that_hang_are_ended(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(4321.5)\n")
    with pytest.raises(RunError, match="did not end within 6 s"):
        run_workers([Loopback()], "sleeper", [], timeout_s=6, folder=tmp_path)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "-m sleeper" not in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["plain"],
        ["ddp"],
        ["torch-1f1b", "--cut", "4", "--microbatches", "4"],
    ],
)
def test_every_baseline_gives_a_rate(command: list[str], tmp_path: Path) -> None:
    options = ["--model", "transformer", "--batch-size", "8"]
    with places("loopback") as where:
        contender = Contender(
            "it", where, ("benchmarks.testbed.two_cores.worker", *command, *options), 8
        )
        windows = list(take_turns([contender], tmp_path, 0.0, 0.3))
    assert all(window.samples_per_s > 0 for window in windows)
