"""The losses of a run, kept beside its checkpoints so that they are known after its workers were
restarted.

    losses.jsonl     a `_Header`, then for every checkpoint a `_LogLine` with what came since the
                     one before

Each loss is written once, and is on disk before the checkpoint is complete.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from planner.formats.files import Record, read_text, write_text
from planner.workers.job import Evaluation, Loss

FILE = "losses.jsonl"
_log = logging.getLogger(__name__)


class _Header(Record):
    """The run that the losses are of."""

    schema_version: Literal[1] = 1
    run: str


class _LogLine(Record):
    """Losses and evaluations between two checkpoints."""

    minibatch: int  # minibatches done
    losses: tuple[tuple[int, float | None], ...]  # (minibatch, loss); None if it is NaN or infinite
    evaluations: tuple[Evaluation, ...]


class Past(Record):
    """Losses and evaluations of a run from before its workers were last restarted, up to the
    checkpoint.
    """

    losses: tuple[Loss, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


NOTHING = Past()


def is_of(folder: Path, run: str) -> bool:
    """Return whether the losses in `folder`, and so its newest checkpoints, are of `run`."""
    try:
        header, _, _ = read_text(folder / FILE).partition("\n")
        return _Header.model_validate_json(header).run == run
    except (OSError, ValueError):
        return False


class RunLog:
    """The file of losses in the folder of the checkpoints, of a run with its restarts; only rank 0
    has one.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / FILE
        self._run = run
        self._size = 0  # bytes of whole lines
        self._losses: list[tuple[int, float | None]] = []
        self._evaluations: list[Evaluation] = []

    def begin(self, first: int, *, again: bool, known: Past = NOTHING) -> Past:
        """Start the file anew, and return what the same run did before minibatch `first` if it is
        started `again`.

        What came after the file's last line, and is `known` from elsewhere, is noted.
        """
        entries: list[_LogLine] = []
        if again and is_of(self._path.parent, self._run):
            try:
                # A crash can leave half a line at the end.
                whole, _, _ = read_text(self._path).rpartition("\n")
                entries = [_LogLine.model_validate_json(line) for line in whole.splitlines()[1:]]
            except (OSError, ValueError) as cause:
                _log.warning(
                    "the losses before the restart cannot be read from '%s': %s", self._path, cause
                )

        # later checkpoints were never completed
        entries = [entry for entry in entries if entry.minibatch <= first]
        # of a process that ended while it wrote
        for leftover in self._path.parent.glob(f".{FILE}.*"):
            leftover.unlink()
        text = "".join(line.model_dump_json() + "\n" for line in (_Header(run=self._run), *entries))
        write_text(self._path, text)
        self._size = len(text.encode())
        done = entries[-1].minibatch if entries else 0
        later = [loss for loss in known.losses if loss.minibatch >= done]
        evaluated = [evaluation for evaluation in known.evaluations if evaluation.minibatch > done]
        self.note(later, evaluated)
        losses = [
            Loss(minibatch=minibatch, loss=loss)
            for entry in entries
            for minibatch, loss in entry.losses
        ]
        evaluations = [evaluation for entry in entries for evaluation in entry.evaluations]
        return Past(losses=(*losses, *later), evaluations=(*evaluations, *evaluated))

    def note(self, losses: Iterable[Loss], evaluations: Iterable[Evaluation]) -> None:
        """Add what came since the last checkpoint, to be written with the next one."""
        self._losses += [(loss.minibatch, loss.loss) for loss in losses]
        self._evaluations += evaluations

    def append(self, minibatch: int) -> None:
        """Write what was noted until `minibatch` minibatches were done, and wait until it is on
        disk.

        Where that fails, the lines before stay, and what was noted is written the next time.
        """
        entry = _LogLine(
            minibatch=minibatch, losses=tuple(self._losses), evaluations=tuple(self._evaluations)
        )
        with self._path.open("r+b") as file:
            file.truncate(self._size)  # removes half a line, left when the disk was full
            file.seek(self._size)
            file.write(entry.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()

        self._losses.clear()
        self._evaluations.clear()
