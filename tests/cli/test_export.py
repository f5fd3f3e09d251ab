"""`plan export` from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.main import main
from planner.formats.plan import save_plan
from planner.formats.profile import LossMean
from tests.exports.plans import plan_of


def test_files_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(plan_of([["wte", "h.0.mlp"], ["h.1.mlp", "loss"]]), tmp_path / "plan.json")
    assert main(["export", "--to", "megatron"]) == 0
    assert "--pipeline-model-parallel-size 2" in capsys.readouterr().out
    assert main(["export", "--to", "megatron", "-o", "megatron.txt"]) == 0
    assert (tmp_path / "megatron.txt").exists()


def test_what_cannot_be_expressed_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(plan_of([["wte", "h.0.mlp"], ["h.1.mlp", "loss"]], (2, 1)), tmp_path / "plan.json")
    assert main(["export", "--to", "megatron", "--plan", str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err.startswith(
        "error: Megatron copies whole pipelines, so it has no form for '2-1'"
    )


def test_losses_that_only_plan_train_weighs_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of([["wte", "h.0.mlp"], ["h.1.mlp", "loss"]])
    for number, (loss, said) in enumerate(
        [(LossMean(over="labels", ignored=-100), True), (None, False)]
    ):
        path = tmp_path / f"{number}.json"
        save_plan(plan.model_copy(update={"loss": loss}), path)
        for system in ("torchtitan", "megatron"):
            assert main(["export", "--to", system, "--plan", str(path), "-o", "-"]) == 0
            assert ("does not weigh microbatches" in capsys.readouterr().err) == said
