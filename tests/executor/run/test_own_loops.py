"""Own loops whose ranks differ end with a sentence that says how; those that only take their time
do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.executor.checkpoint.folders import complete
from planner.formats.plan import save_plan
from tests.executor.own_loops import HANG_TIMEOUT_S, MINIBATCHES, MODEL, SIZE, run_loop
from tests.executor.plans import make_plan, structural_profile

SYNCHRONOUS, ASYNCHRONOUS = "synchronous.json", "asynchronous.json"
OTHERS = "rank 1 got other samples than rank 0, or in another order"
LENGTHS = (
    "rank 1 ended the loop after 3 minibatches, and on rank 0 another minibatch comes: "
    "loaders of different length"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the model, and a plan of two stages under each kind of schedule."""
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    save_plan(
        make_plan(structural_profile(path, SIZE // 2), (1, 1), "1f1b-flush", 2),
        tmp_path / SYNCHRONOUS,
    )
    save_plan(make_plan(structural_profile(path, SIZE), (1, 1)), tmp_path / ASYNCHRONOUS)
    return tmp_path


# By loop: the first minibatch that no weights may have seen, and what is said.
DIFFERENT: dict[str, tuple[int, str]] = {
    "sampled": (0, f"minibatch 0 is not the same on all ranks: {OTHERS}"),
    "shuffled": (1, f"minibatch 1 is not the same on all ranks: {OTHERS}"),
    "reordered": (2, f"minibatch 2 is not the same on all ranks: {OTHERS}"),
    "smaller": (
        2,
        "minibatch 2 is not the same on all ranks: it has 4 samples on rank 1, and 8 on rank 0",
    ),
    "short": (3, LENGTHS),
    "uneven": (3, f"minibatch 3 is not the same on all ranks: {OTHERS}"),
    "evaluated_otherwise": (
        1,
        f"batch 1 of the evaluation after 1 minibatch is not the same on all ranks: {OTHERS}",
    ),
    "evaluated_shorter": (1, "evaluate() was given 3 batches on rank 1, and 2 on rank 0"),
    "saved_alone": (
        2,
        "the calls of the pipeline differ: step() after 2 minibatches on rank 1, "
        "and save_weights() after 2 minibatches on rank 0",
    ),
    "left": (3, LENGTHS),
}


def quickly(*names: str) -> list[object]:
    """Return all loops that differ, those but `names` as slow tests."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in DIFFERENT
    ]


@pytest.mark.parametrize("name", quickly("sampled", "short"))
def test_under_synchronous_schedules_all_ranks_say_at_once_who_differs(
    name: str, folder: Path
) -> None:
    first, words = DIFFERENT[name]
    reports, log = run_loop(name, folder, SYNCHRONOUS)
    for report in reports:
        assert report["kind"] == "InputError", log
        assert report["error"].partition("\n")[0] == words
        assert report["updates"] in ([], [first]), "no weights have seen what differs"


@pytest.mark.parametrize("name", quickly("shuffled"))
def test_under_asynchronous_schedules_no_update_has_what_differs(name: str, folder: Path) -> None:
    first, words = DIFFERENT[name]
    reports, log = run_loop(name, folder, ASYNCHRONOUS)
    assert words in log
    for report in filter(None, reports):  # a rank that waits for a message is ended from outside
        assert report["kind"] in ("InputError", "ConnectionLostError"), log
        assert all(updates <= first for updates in report["updates"])


@pytest.mark.parametrize("plan", [SYNCHRONOUS, pytest.param(ASYNCHRONOUS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "slow_alone",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("same", "slow_everywhere")),
    ],
)
def test_loops_that_take_their_time_or_shuffle_alike_go_on(
    name: str, plan: str, folder: Path
) -> None:
    reports, log = run_loop(name, folder, plan)
    assert [report.get("error") for report in reports] == [None, None], log
    assert reports[0]["losses"] == reports[1]["losses"]
    assert len(reports[0]["losses"]) == (MINIBATCHES if name == "same" else 2)


def test_checkpoints_go_to_several_folders_and_outlive_the_one_continued_from(
    folder: Path,
) -> None:
    reports, log = run_loop("saved_in_turn", folder, SYNCHRONOUS)
    assert [report.get("error") for report in reports] == [None, None], log
    for name, expected in (("last", [1, 2]), ("best", [2]), ("other", [2])):
        assert [int(path.name[-8:]) for path in complete(folder / name)] == expected

    reports, log = run_loop("continued", folder, SYNCHRONOUS)
    assert [report.get("error") for report in reports] == [None, None], log
    for minibatch in range(3, MINIBATCHES + 1):
        assert complete(folder / f"after-{minibatch}")


@pytest.mark.parametrize("plan", [SYNCHRONOUS, pytest.param(ASYNCHRONOUS, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_back_from_its_own_code_is_named_after_the_time_out(
    plan: str, folder: Path
) -> None:
    reports, log = run_loop("never_back", folder, plan)
    assert {} in reports, "the one that sleeps cannot say anything"
    (line,) = {
        each
        for each in log.splitlines()
        if each.startswith("worker 1 (stage 1): has not moved for ")
    }
    waited_s = float(line.partition(" for ")[2].partition(" s,")[0])
    assert waited_s >= HANG_TIMEOUT_S
    assert "while running the script's own code" in line
    assert "in never_back()" in line
    assert (
        "hint: look there for what may block; allow more time with planner.pipeline(..., "
        "hang_timeout_s=SECONDS)" in log
    )
