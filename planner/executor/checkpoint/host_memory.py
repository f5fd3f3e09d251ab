"""State that survives without a disk: files in the memory of hosts, which outlive the processes
that train.

    /dev/shm/planner-3f9c...-0/           of one run on this host
        step-00000040-0003/               after 40 minibatches, of the start with this number
            stage-0.weights.safetensors   what this host's workers wrote, and what other hosts sent
            ...
            index.json                    a `Checkpoint`, written when all hosts had all files
            losses.jsonl                  as beside checkpoints, until then
            start.json                    of the start that made it
        losses.jsonl                      that the run goes on with
        start.json                        a `Start`: who trains at the moment
        fault.json                        a `Fault`, of a start that failed

The files are those of a checkpoint, so any plan of the model reads them.
"""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from pydantic import Field

from planner.errors import InputError
from planner.executor.checkpoint.folders import INDEX, STEP, Checkpoint, StagePart
from planner.executor.checkpoint.tensor_file import TensorFile
from planner.executor.observe.run_log import FILE as LOSSES
from planner.formats.files import Record, RecordT, save_record
from planner.workers.job import Job

# the groups that files travel over: whoever hangs is found by its heartbeat
FOR_EVER = timedelta(days=365)
_PIECE_BYTES = 1 << 26  # 64 MiB per message
_IDENTITY = "host"


class Fault(Record):
    """Why the workers of a host ended."""

    message: str
    at_s: float  # by the host's clock, since the epoch
    start: int  # the last one that was noted before


class Start(Record):
    """One start of the workers on all hosts."""

    number: int = 0
    hosts: Mapping[str, str]  # their names by their identities
    places: Mapping[str, str] = Field(default_factory=dict)  # and those of their memories
    first: int  # minibatch that it began with
    events: tuple[str, ...] = ()  # what happened so far, a sentence each
    vain: int = 0  # starts before it that began with the same minibatch on the same hosts


class Transfer(NamedTuple):
    """A file that one worker sends to another one's host."""

    file: str
    size_bytes: int
    sender: int
    receiver: int


def files_of(parts: Iterable[StagePart]) -> dict[str, TensorFile]:
    """Return the files of these parts, by their names."""
    files = [
        file for part in parts for file in (part.weights, part.optimizer_file) if file is not None
    ]
    return {file.name: file for file in files}


@dataclass(frozen=True)
class HostMemory:
    """The folder of a run in the memory of this host; only one of the host's workers writes the
    small files.
    """

    folder: Path

    @classmethod
    def of(cls, job: Job) -> "HostMemory":
        """Return the copies' folder of a run on this host."""
        return cls(Path(job.elastic.copy_folder) / f"planner-{job.run}")

    @property
    def leads(self) -> bool:
        """Whether this worker writes and sends for its host."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def place(self) -> str:
        """Where this memory is; the same after it was emptied."""
        return f"{socket.gethostname()} {self.folder.absolute()}"

    def make(self) -> None:
        """Make the folder, for this user alone; raise InputError where it cannot be made, or
        another user has made it.

        Its name can be guessed, and everybody may make folders in the memory of a host.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as cause:
            problem = f"copies cannot be kept in '{self.folder.parent}': {cause.strerror or cause}"
            raise InputError(problem, hint="name another folder with `copy_folder`") from None

        if self.folder.is_symlink() or self.folder.stat().st_uid != os.geteuid():
            hint = "name another folder with `copy_folder`, in which other users cannot write"
            raise InputError(
                f"the folder of this run's copies, '{self.folder}', belongs to another user",
                hint=hint,
            )

    def identity(self) -> tuple[str, str]:
        """Return what tells this host from others for as long as its memory lasts, and its name for
        people.
        """
        path = self.folder / _IDENTITY
        self.make()
        if not path.exists():
            path.write_text(uuid4().hex, encoding="utf-8")
        return path.read_text(encoding="utf-8"), socket.gethostname()

    def copies(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each whole file, by folder and name."""
        return {
            folder.name: {
                file.name: file.stat().st_size for file in folder.iterdir() if file.name[0] != "."
            }
            for folder in self.folder.glob(f"{STEP}*")
        }

    def indices(self) -> dict[str, Checkpoint]:
        """Return the indices of complete copies, by their folders."""
        paths = self.folder.glob(f"{STEP}*/{INDEX}")
        return {
            path.parent.name: Checkpoint.model_validate_json(path.read_text("utf-8"))
            for path in paths
        }

    def whole_copies(self) -> list[str]:
        """Return the folders of complete copies, whose files other hosts may have."""
        return sorted(path.parent.name for path in self.folder.glob(f"{STEP}*/{INDEX}"))

    def complete(self, name: str, index: Checkpoint) -> None:
        """Call a copy complete whose files are there, with the losses until then and the start that
        made it.
        """
        shutil.copy(self.folder / LOSSES, self.folder / name)
        shutil.copy(self._file(Start), self.folder / name)
        save_record(index, self.folder / name / INDEX)

    def makers(self) -> dict[str, Start]:
        """Return the starts that made the complete copies, by the folders of these; older versions
        noted none.
        """
        paths = {name: self.folder / name / self._file(Start).name for name in self.whole_copies()}
        noted = {name: path for name, path in paths.items() if path.exists()}
        return {
            name: Start.model_validate_json(path.read_text("utf-8")) for name, path in noted.items()
        }

    def go_on_from(self, name: str, index: Checkpoint, maker: Start | None) -> None:
        """Take the losses of a copy for those so far, and remove what was copied after it."""
        shutil.copy(self.folder / name / LOSSES, self.folder)
        if maker is not None:
            save_record(maker, self.folder / name / self._file(Start).name)
        save_record(index, self.folder / name / INDEX)
        self.keep([each for each in self.copies() if each <= name])

    def keep(self, names: Sequence[str]) -> None:
        """Remove all other copies."""
        for folder in self.folder.glob(f"{STEP}*"):
            if folder.name not in names:
                # The index first: what is left of a crash within must not look like a copy.
                (folder / INDEX).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def note(self, record: Start | Fault) -> None:
        """Keep a start or a fault for whoever starts next."""
        self.make()
        save_record(record, self._file(type(record)))

    def read(self, record: type[RecordT]) -> RecordT | None:
        """Return the start or the fault that was noted last, if one was."""
        with suppress(OSError, ValueError):  # its writer was killed
            return record.model_validate_json(self._file(record).read_text(encoding="utf-8"))
        return None

    def _file(self, record: type[Record]) -> Path:
        return self.folder / f"{record.__name__.lower()}.json"

    def remove(self) -> None:
        """Delete all copies of the run on this host."""
        shutil.rmtree(self.folder, ignore_errors=True)


def note_fault(job: Job, message: str) -> None:
    """Note why this host's workers end, for the next start, unless it has been told another reason
    before.
    """
    memory = HostMemory.of(job)
    try:
        memory.make()
    except InputError:  # the message says so
        return

    last = memory.read(Start)
    noted = memory.read(Fault)
    start = -1 if last is None else last.number
    if noted is None or noted.start != start:
        memory.note(Fault(message=message, at_s=time.time(), start=start))


def missing_files(
    wanted: Mapping[int, Mapping[str, int]], having: Callable[[str, int], Sequence[int]]
) -> Iterator[Transfer]:
    """Yield what hosts lack, from those that have it, which take turns.

    Args:
        wanted: the bytes of files by name, by the worker that receives for its host.
        having: returns the workers that send for hosts which have a file of so many bytes.
    """
    for turn, (receiver, files) in enumerate(sorted(wanted.items())):
        for name, size_bytes in files.items():
            senders = having(name, size_bytes)
            if receiver not in senders:
                yield Transfer(name, size_bytes, senders[turn % len(senders)], receiver)


def allocate(folder: Path, transfers: Iterable[Transfer]) -> None:
    """Take memory for what this worker receives; raise OSError where there is none.

    Without it the first write to a page that the system does not have would end the process.
    """
    for each in transfers:
        if each.receiver == dist.get_rank():
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f".{each.file}").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, each.size_bytes)


def exchange_files(
    folder: Path,
    transfers: Sequence[Transfer],
    group: dist.ProcessGroup,
    moved: Callable[[], object],
) -> None:
    """Send and receive files, straight from memory to memory; all workers of the group that have a
    part call it.

    `moved` is called after every piece. What is received must have been allocated.
    """
    rank = dist.get_rank()
    sent = list[dist.Work]()
    for tag, each in enumerate(transfers):
        if each.sender == rank:
            content = torch.from_file(
                str(folder / each.file), size=each.size_bytes, dtype=torch.uint8
            )
            for piece in torch.split(content, _PIECE_BYTES):
                work = dist.isend(piece, each.receiver, group, tag)
                assert work is not None
                sent.append(work)

    for tag, each in enumerate(transfers):
        if each.receiver == rank:
            hidden = folder / f".{each.file}"
            content = torch.from_file(
                str(hidden), shared=True, size=each.size_bytes, dtype=torch.uint8
            )
            for piece in torch.split(content, _PIECE_BYTES):
                dist.recv(piece, each.sender, group, tag)
                moved()
            hidden.rename(folder / each.file)

    for work in sent:
        work.wait()
        moved()
