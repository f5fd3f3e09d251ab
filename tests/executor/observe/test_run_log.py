"""The losses of a run outlive its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.executor.observe.run_log import FILE, Past, RunLog
from planner.workers.job import Evaluation, Loss


def losses(*minibatches: int) -> tuple[Loss, ...]:
    """One of them is no number."""
    return tuple(Loss(minibatch=m, loss=None if m == 1 else m / 3) for m in minibatches)


def evaluation(minibatch: int) -> Evaluation:
    return Evaluation(minibatch=minibatch, samples=10, loss=0.5, metrics={"accuracy": 0.9})


def written(folder: Path) -> None:
    """Two checkpoints, and a third that was never complete."""
    log = RunLog(folder, "this")
    assert log.begin(0, again=False) == Past()
    for minibatch in (2, 4, 6):
        log.note(losses(minibatch - 2, minibatch - 1), [evaluation(minibatch)])
        log.append(minibatch)


def test_a_run_that_is_started_again_knows_its_losses_up_to_the_checkpoint(tmp_path: Path) -> None:
    written(tmp_path)
    again = RunLog(tmp_path, "this")
    assert again.begin(4, again=True) == Past(
        losses=losses(0, 1, 2, 3), evaluations=(evaluation(2), evaluation(4))
    )
    again.note(losses(4, 5), [])
    again.append(6)
    (tmp_path / f".{FILE}.abc").touch()  # of a process that ended while it replaced the file
    assert RunLog(tmp_path, "this").begin(6, again=True).losses == losses(0, 1, 2, 3, 4, 5)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_is_known_from_elsewhere_follows_what_the_file_has(tmp_path: Path) -> None:
    written(tmp_path)
    known = Past(
        losses=losses(*range(7)), evaluations=(evaluation(2), evaluation(4), evaluation(7))
    )
    log = RunLog(tmp_path, "this")
    assert log.begin(7, again=True, known=known).losses == losses(*range(7))
    log.append(8)
    after = RunLog(tmp_path, "this").begin(8, again=True)
    assert after.losses == losses(*range(7))
    assert [each.minibatch for each in after.evaluations] == [2, 4, 6, 7]


def test_another_run_begins_anew(tmp_path: Path) -> None:
    written(tmp_path)
    assert RunLog(tmp_path, "that").begin(4, again=True) == Past()
    written(tmp_path)
    assert RunLog(tmp_path, "this").begin(4, again=False) == Past()
    assert RunLog(tmp_path, "this").begin(4, again=True) == Past()


def test_half_a_line_is_none_and_damage_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-20])
    assert RunLog(tmp_path, "this").begin(6, again=True).losses == losses(0, 1, 2, 3)
    assert not caplog.text
    path.write_text(path.read_text().replace("minibatch", "minute"))
    assert RunLog(tmp_path, "this").begin(6, again=True) == Past()
    assert "the losses before the restart cannot be read" in caplog.text
