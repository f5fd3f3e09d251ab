"""Each row can fail: what is broken on purpose, or measured wrong, is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.errors import InputError
from planner.model.stage.stage import StageModule
from planner.schedule.flush import FLUSH
from planner.schedule.naive import NAIVE
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.selftest.checks import cuts, failures, links, memory, throughput, training
from planner.selftest.lab import SEED, Lab, even_plan, location, spec_of
from planner.selftest.reference import Reference
from planner.selftest.registry import CHECKS
from planner.selftest.rows import Case, Check, Outcome, judged
from planner.selftest.run import SelftestOptions, run_case, selftest
from planner.selftest.workers.exchange import Exchanged
from planner.selftest.workers.one_stage import Pairs
from planner.workers.job import WorkerReport

CPU = torch.device("cpu")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(CPU, 2, tmp_path)


def cut_case(lab: Lab, name: str) -> Outcome:
    (case,) = (case for case in cuts.CHECK.cases(lab) if case.name == name)
    return case.run()


def test_a_model_cut_after_every_layer_equals_the_whole_in_three_types(lab: Lab) -> None:
    outcome = cut_case(lab, "convolutional")
    assert outcome.result == "passed", outcome
    assert outcome.value == 0.0
    assert outcome.found == "10 cuts; float32, bfloat16, float16 equal to the bit"


def test_a_wrong_gradient_and_a_wrong_type_at_a_cut_are_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StageModule.forward

    def scaled(self: StageModule, *args: object) -> dict[str, Tensor]:
        results = plain(self, *args)  # type: ignore[arg-type]
        return {name: value * 1.001 if value.requires_grad else value for name, value in results.items()}

    def doubled(self: StageModule, *args: object) -> dict[str, Tensor]:
        return {name: value.double() for name, value in plain(self, *args).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(StageModule, "forward", scaled)
    outcome = cut_case(lab, "convolutional")
    assert outcome.result == "failed"
    assert outcome.found.startswith("float32: ")
    monkeypatch.setattr(StageModule, "forward", doubled)
    outcome = cut_case(lab, "convolutional")
    assert outcome.result == "failed"
    assert "torch.float64" in outcome.found


def test_models_of_a_folder_are_checked_and_those_that_cannot_be_are_skipped(lab: Lab, tmp_path: Path) -> None:
    for name, source in {
        "tiny": Path(location("convolutional").partition(":")[0]).read_text("utf-8"),
        "large": "def build_model(): ...",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(source, encoding="utf-8")
    lab.profiles = tmp_path
    assert cut_case(lab, "profiles/tiny").result == "passed"
    assert cut_case(lab, "profiles/large") == Outcome("skipped", "has no build_tiny()")


def test_the_reference_tells_schedules_apart_that_use_other_versions_of_the_weights(lab: Lab) -> None:
    """The rows of training could not fail if one more update between forward and update did not show."""
    model = training.CONVOLUTIONAL
    profile = lab.profile(model, training.BATCH_SIZE)
    one, other = (
        Reference(spec_of(model), profile, even_plan(profile, schedule, (1, 1)), SEED, CPU).train(8)
        for schedule in (ONE_F_ONE_B, NAIVE)
    )
    outcome = training.compared(lab, one, other, "one process")
    assert outcome.result == "failed"
    assert outcome.found.startswith("the loss of minibatch ")
    assert (
        training.compared(lab, one, one, "one process").found == "8 losses are those of one process, equal to the bit"
    )
    assert training.compared(lab, one, one[1:], "one process").result == "failed"
    assert training.compared(lab, [float("nan")], [1.0], "one process").result == "failed"


def test_workers_train_as_one_process(lab: Lab) -> None:
    wanted = f"{FLUSH}"
    (case,) = (case for case in training.CHECK.cases(lab) if case.name == wanted)
    outcome = case.run()
    assert outcome.result == "passed", outcome
    assert outcome.value is not None
    assert outcome.value <= training.LIMIT_CPU


def test_an_injected_failure_is_told_and_leaves_nothing(lab: Lab) -> None:
    (case,) = (case for case in failures.CHECK.cases(lab) if case.name == "out of memory")
    outcome = case.run()
    assert outcome.result == "passed", outcome
    assert "worker 0 (stage 0)" in outcome.found


def test_another_cause_a_late_one_and_processes_that_are_left_fail() -> None:
    told = "worker 0 (stage 0), in the update after minibatch 5: ValueError: injected by the self-test"
    assert failures.judge("exception", told, 1.0, 0).result == "passed"
    assert failures.judge("exception", told, 11.0, 0).result == "failed"
    assert failures.judge("exception", told, 1.0, 2).found.startswith("2 processes are left running")
    assert failures.judge("killed", told, 1.0, 0).found.startswith("the message does not name 'SIGKILL'")


def test_processes_are_found_by_their_environment() -> None:
    mark = f"mark-of-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"MARK": mark}) as process:
        assert failures.processes_with(mark) == 1
        process.kill()
    assert failures.processes_with(mark) == 0


def test_a_wrong_message_fails_the_links() -> None:
    good = Exchanged(short_s=1e-4, long_s=1e-3, all_reduce_s=2e-3)
    assert links.judge([good, good]).result == "passed"
    wrong = links.judge([good, Exchanged(wrong="worker 1 received 3 from worker 0, which had sent 2")])
    assert (wrong.result, wrong.found) == ("failed", "worker 1 received 3 from worker 0, which had sent 2")


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

    results = {predicted: memory.judge((report(105), report(predicted))).result for predicted in (99, 100, 109, 112)}
    assert results == {99: "failed", 100: "passed", 109: "passed", 112: "failed"}


def test_throughput_fails_below_97_percent() -> None:
    def ratio(plain_s: float) -> Outcome:
        return throughput.judge(
            Pairs(plain_s=(plain_s,), pipeline_s=(1.0,), plain_thread_s=(1.0,), pipeline_thread_s=(1.0,))
        )

    assert [ratio(plain_s).result for plain_s in (0.96, 0.98, 1.1)] == ["failed", "passed", "passed"]
    assert ratio(0.96).value == 0.96


@pytest.fixture
def broken() -> Check:
    def fails() -> Outcome:
        raise ValueError("no luck")

    return Check("broken", "?", lambda lab: iter([Case("raises", fails), Case("good", lambda: judged(True, "fine"))]))


def test_a_case_that_raises_fails_its_row_and_no_other(broken: Check, lab: Lab) -> None:
    rows = [run_case(broken, case) for case in broken.cases(lab)]
    assert [(row.result, row.found) for row in rows] == [("failed", "ValueError: no luck"), ("passed", "fine")]


def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for options, words in (
        (SelftestOptions(only=("nothing",)), "`only=nothing` is no check"),
        (SelftestOptions(profiles=str(tmp_path)), "has no models"),
        (SelftestOptions(workers=0), "`workers=0`"),
    ):
        with pytest.raises(InputError, match=words):
            selftest(options.model_copy(update={"device": "cpu"}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="for one host"):
        selftest(SelftestOptions(device="cpu"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_everything_passes_here() -> None:
    report = selftest(SelftestOptions(device="cpu"))
    assert {row.check for row in report.rows} == {check.name for check in CHECKS}
    assert not [row for row in report.rows if row.result == "failed"]
