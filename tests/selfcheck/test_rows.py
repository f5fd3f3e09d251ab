"""Each row can fail: what is broken on purpose, or measured wrong, is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.errors import InputError
from planner.model.spec import load_model_file
from planner.model.stage.stage import StageModule
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.selfcheck import cuts, training
from planner.selfcheck.lab import SEED, Lab, Outcome, even_plan, judged, location
from planner.selfcheck.run import CHECKS, run_case, selftest
from planner.workers.job import WorkerReport

CPU = torch.device("cpu")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(CPU, 2, tmp_path)


def cut_case(lab: Lab, name: str) -> Outcome:
    (case,) = (find for each, find in cuts.cases(lab) if each == name)
    return case()


def test_a_model_cut_after_every_layer_is_as_exact_as_the_whole_in_three_types(lab: Lab) -> None:
    outcome = cut_case(lab, "convolutional")
    assert outcome.result == "passed", outcome
    assert outcome.found.startswith("28 cuts; float32 ")
    assert "; float16 " in outcome.found


def test_a_wrong_gradient_and_a_wrong_type_at_a_cut_are_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StageModule.forward

    def scaled(self: StageModule, *args: object) -> dict[str, Tensor]:
        results = plain(self, *args)  # type: ignore[arg-type]
        return {
            name: value * 1.001 if value.requires_grad else value for name, value in results.items()
        }

    def doubled(self: StageModule, *args: object) -> dict[str, Tensor]:
        values = plain(self, *args)  # type: ignore[arg-type]
        return {name: value.double() for name, value in values.items()}

    monkeypatch.setattr(StageModule, "forward", scaled)
    outcome = cut_case(lab, "convolutional")
    assert outcome.result == "failed"
    assert outcome.found.startswith("float32: the error of ")
    monkeypatch.setattr(StageModule, "forward", doubled)
    row = run_case("cuts", ("convolutional", lambda: cut_case(lab, "convolutional")))
    assert row.result == "failed"
    assert "torch.float64" in row.found


def test_rounding_is_no_error_and_a_gradient_of_zero_is_judged_by_it() -> None:
    """In bfloat16 T5's gradients differ by their own error, and the key bias of BERT's attention
    has nothing else.
    """
    torch.manual_seed(0)
    exact = {
        "weight": torch.randn(1000, dtype=torch.float64),
        "key.bias": torch.zeros(64, dtype=torch.float64),
    }

    def rounded(error: float) -> dict[str, Tensor]:
        return {name: value + error * torch.randn(value.shape) for name, value in exact.items()}

    eps = torch.finfo(torch.bfloat16).eps
    assert cuts.error_ratio(rounded(0.04), rounded(0.04), exact, eps)[0] < 1.5
    ratio, name = cuts.error_ratio(
        rounded(0.04) | {"key.bias": torch.ones(64)}, rounded(0.04), exact, eps
    )
    assert ratio > cuts.MOST
    assert name == "'key.bias'"
    assert cuts.error_ratio({"weight": exact["weight"]}, rounded(0.04), exact, eps)[0] == float(
        "inf"
    )
    assert not cuts.error_ratio(rounded(float("nan")), rounded(0.04), exact, eps)[0] <= cuts.MOST


def test_models_of_the_user_are_cut_too(lab: Lab) -> None:
    lab.models = (location("build_convolutional"),)
    assert cut_case(lab, location("build_convolutional")).result == "passed"


def test_the_reference_tells_schedules_apart_that_use_other_versions_of_the_weights(
    lab: Lab,
) -> None:
    """The rows of training could not fail if one more update between forward and update did not
    show.
    """
    model = training.CONVOLUTIONAL
    profile = lab.profile(model)
    one, other = (
        training.train_alone(
            load_model_file(model),
            profile,
            even_plan(profile, schedule, (1, 1), microbatches=1),
            SEED,
            CPU,
            8,
        )[0]
        for schedule in (ONE_F_ONE_B, FLUSH)
    )
    outcome = training.compared(one, other, "one process", training.LIMIT_CPU)
    assert outcome.result == "failed"
    assert outcome.found.startswith("the loss of minibatch ")
    same = training.compared(one, one, "one process", training.LIMIT_CPU)
    assert same.found == "8 losses are those of one process, equal to the bit"
    assert training.compared(one, one[1:], "one process", 1.0).result == "failed"
    assert training.compared([float("nan")], [1.0], "one process", 1.0).result == "failed"


def test_the_reference_keeps_tied_weights_equal(lab: Lab) -> None:
    profile = lab.profile(training.TRANSFORMER)
    plan = even_plan(profile, FLUSH, (1, 1))
    spec = load_model_file(training.TRANSFORMER)
    torch.manual_seed(SEED)
    before = spec.build_model().state_dict()
    after = training.train_alone(spec, profile, plan, SEED, CPU, 2)[1].state_dict()
    tied = [name for name in after if name.endswith("linear1.weight")]
    assert torch.equal(after[tied[0]], after[tied[-1]])
    assert not torch.equal(after[tied[0]], before[tied[0]])


@pytest.mark.usefixtures("warm_start")
def test_workers_train_as_one_process_and_a_killed_one_is_told(lab: Lab) -> None:
    cases = dict(training.training_cases(lab)) | dict(training.failure_cases(lab))
    outcome = cases[f"{FLUSH}"]()
    assert outcome.result == "passed", outcome
    assert outcome.value is not None
    assert outcome.value <= training.LIMIT_CPU
    killed = cases["killed"]()
    assert killed.result == "passed", killed
    assert "worker 0 (stage 0) was killed by SIGKILL" in killed.found


def test_memory_fails_below_the_measured_and_far_above_it() -> None:
    def report(predicted: int) -> WorkerReport:
        return WorkerReport(
            rank=0,
            stage=0,
            busy_share=1.0,
            samples_per_s=1.0,
            peak_memory_bytes=100,
            predicted_memory_bytes=predicted,
            weight_versions=1,
        )

    def results(least: float) -> list[str]:
        return [
            training.memory_outcome((report(105), report(predicted)), least).result
            for predicted in (94, 99, 109, 112)
        ]

    assert results(training.LEAST_GPU) == ["failed", "failed", "passed", "failed"]
    assert results(training.LEAST_CPU) == ["failed", "passed", "passed", "failed"]


def test_a_case_that_raises_fails_its_row_and_no_other() -> None:
    def fails() -> Outcome:
        raise ValueError("no luck")

    rows = [
        run_case("broken", case)
        for case in (("raises", fails), ("good", lambda: judged(True, "fine")))
    ]
    assert [(row.result, row.found) for row in rows] == [
        ("failed", "ValueError: no luck"),
        ("passed", "fine"),
    ]


def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="`only=nothing` is no check"):
        selftest(device="cpu", only=["nothing"])
    with pytest.raises(InputError, match="`workers=0`"):
        selftest(device="cpu", workers=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="for one host"):
        selftest(device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_everything_passes_here() -> None:
    report = selftest(device="cpu")
    assert {row.check for row in report.rows} == set(CHECKS)
    assert not [row for row in report.rows if row.result == "failed"]
