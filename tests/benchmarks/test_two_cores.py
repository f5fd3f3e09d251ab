"""The benchmark's own machinery: tables, started workers, and the baselines' rates."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.two_cores.launch import Loopback, RunError, last_object, places, run_workers
from benchmarks.two_cores.table import Sample, markdown

MODELS = ("transformer", "vgg_like")


def test_table_has_medians_range_and_ratios() -> None:
    samples = [Sample("m", "loopback", "one process", k, rate) for k, rate in enumerate((90.0, 100.0, 120.0))]
    samples += [Sample("m", "loopback", "DDP", 0, 50.0), Sample("m", "loopback", "ours", 0, 190.0, 200.0)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(samples).splitlines()[4:]]
    assert rows == [
        ["one process", "100.0", "90.0 to 120.0", "", "1.00", "2.00"],
        ["DDP", "50.0", "50.0 to 50.0", "", "0.50", "1.00"],
        ["ours", "190.0", "190.0 to 190.0", "200.0", "1.90", "3.80"],
    ]


def test_each_model_and_network_has_a_table() -> None:
    samples = [Sample(model, link, "DDP", 0, 1.0) for model in MODELS for link in ("loopback", "1gbit")]
    headings = [line for line in markdown(samples).splitlines() if line.startswith("###")]
    assert headings == [
        "### transformer, loopback",
        "### transformer, 1gbit",
        "### vgg_like, loopback",
        "### vgg_like, 1gbit",
    ]


@pytest.mark.parametrize("text", ['{"a": 1}', 'gloo says hello\n{"a": 1}\n', 'hello\n{\n "a": 1\n}\n'])
def test_the_result_is_found_behind_other_output(text: str) -> None:
    assert last_object(text) == {"a": 1}


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_the_contract(name: str) -> None:
    module = importlib.import_module(f"benchmarks.two_cores.{name}")
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
        run_workers([Loopback()], "benchmarks.two_cores.worker", ["nonsense"], timeout_s=60)


def test_workers_that_hang_are_ended(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(4321.5)\n")
    with pytest.raises(RunError, match="did not end within 6 s"):
        run_workers([Loopback()], "sleeper", [], timeout_s=6, folder=tmp_path)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "-m sleeper" not in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "contender",
    [
        ["plain"],
        ["ddp"],
        ["ddp-each"],
        ["torch-1f1b", "--cut", "4", "--microbatches", "4"],
        ["torch-gpipe", "--cut", "4", "--microbatches", "4"],
    ],
)
def test_every_baseline_gives_a_rate(contender: list[str]) -> None:
    options = ["--model", "transformer", "--batch-size", "8", "--seconds", "0.5"]
    with places("loopback") as where:
        result = run_workers(where, "benchmarks.two_cores.worker", [*contender, *options], timeout_s=90)
    assert result["samples_per_s"] > 0
    assert result["cores"] == [0]
