"""The benchmark's own machinery: tables, started workers, and the baselines' rates."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.two_cores.__main__ import first_stage_s
from benchmarks.two_cores.aims import ASYNCHRONOUS, SHARED_NOTHING, UNSTASHED, aims_markdown
from benchmarks.two_cores.launch import Loopback, RunError, last_object, places, run_workers
from benchmarks.two_cores.stashing import IN_FLIGHT, StashMemory, deep_plan
from benchmarks.two_cores.table import DDP, ONE_PROCESS, Sample, markdown
from benchmarks.two_cores.unstashed import OneVersion
from planner.formats.plan_shape import shape_of
from planner.schedule.streams.check import check_streams
from tests.samples import layer, profile

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


def test_every_aim_is_said_to_be_reached_or_missed() -> None:
    rates = {ONE_PROCESS: 100.0, SHARED_NOTHING: 190.0, DDP: 50.0, "torch 1F1B, 4 microbatches": 120.0}
    rates |= {"ours 1f1b-flush, 4 microbatches": 126.0, "ours zb-h1, 4 microbatches": 120.0}
    samples = [Sample("vgg_like", "1gbit", name, 0, rate) for name, rate in rates.items()]
    samples += [Sample("vgg_like", "1gbit", ASYNCHRONOUS, 0, 180.0, None, 0.104)]
    samples += [Sample("vgg_like", "1gbit", UNSTASHED, 0, 185.0, None, 0.1)]
    lines = aims_markdown(samples, [StashMemory("vgg_like", 1000, 8, 17_500, 10_000)]).splitlines()[4:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [(row[0], row[-1]) for row in rows] == [
        ("1f1b at least 94% of twice one process", "missed"),
        ("1f1b beside two processes that share nothing (no aim)", ""),
        ("1f1b at least 4.3 times DDP", "missed"),
        ("1f1b-flush no slower than torch's 1F1B, 4 microbatches", "reached"),
        ("zb-h1 ahead of 1f1b-flush, 4 microbatches", "missed"),
        ("weight stashing at most 5% of the first stage's step", "reached"),
        ("memory of 8 versions within 5% of (d - 1) W", "missed"),
    ]
    assert [row[2] for row in rows[:6]] == ["90.0%", "94.7%", "3.60 times", "1.05 times", "0.95 times", "+4.0%"]
    assert "(+7.1%)" in rows[6][2]


def test_the_first_stages_step_is_its_busy_time() -> None:
    report = {"stage": 0, "busy_share": 0.5, "samples_per_s": 80.0}
    other = {"stage": 1, "busy_share": 1.0, "samples_per_s": 80.0}
    assert first_stage_s({"reports": [other, report], "minibatch_size": 16}) == pytest.approx(0.1)
    assert first_stage_s({"samples_per_s": 80.0}) is None


def test_the_deep_plan_has_most_weights_in_the_first_stage() -> None:
    layers = [layer(f"l{i}", 1, 2, output_bytes=8, weight_bytes=1000, saved_bytes=100) for i in range(10)]
    plan = deep_plan(profile(*layers))
    assert [len(stage.layers) for stage in plan.stages] == [9, 1]
    assert [stage.in_flight for stage in plan.stages] == [IN_FLIGHT, 1]
    check_streams(shape_of(plan), 3 * IN_FLIGHT)


def test_without_stashing_weights_change_under_a_forward_in_flight() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    versions = OneVersion([weight])
    before = weight.data_ptr()
    versions.stash("unit")
    with versions.at("unit"):
        result = weight**2
    versions.update(lambda: weight.data.mul_(3))
    with versions.restored("unit"):
        torch.autograd.backward(result.sum())  # autograd's guard is not tripped
    assert weight.data_ptr() == before
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2,), 6.0))


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
