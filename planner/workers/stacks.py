"""Where the threads of this process are in their code, read without a trace in them.

`sys._current_frames` makes objects of frames that otherwise have none. Such an object keeps what
its function's variables held for as long as another thread has it. `torch.export` looks for tensors
that outlive its tracing, so a capture that is looked at in this way fails, or gives another graph.
`faulthandler` writes down files and lines in C, and makes no object of a frame.
"""

import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from planner.workers.failures import Frame

_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def stacks_of_others() -> list[list[Frame]]:
    """Return the frames of all threads but the calling one, outermost first; the main thread comes
    first.

    Of each stack the innermost 100 frames are known, which is what `faulthandler` writes.
    """
    stacks = dict(_stacks(_dump()))
    stacks.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    threads = sorted(stacks, key=lambda thread: thread != main)
    return [stacks[thread] for thread in threads]


def _dump() -> str:
    # A file, because a pipe may be full, and nobody else runs meanwhile who could read it. In
    # memory, because a disk may be full, too.
    with _file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("ascii", errors="replace")


def _file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # Linux
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _stacks(dump: str) -> Iterator[tuple[int, list[Frame]]]:
    ident: int | None = None
    frames: list[Frame] = []
    for line in dump.splitlines():
        thread = _THREAD.match(line)
        frame = _FRAME.match(line)
        if thread is not None:
            if ident is not None:
                yield ident, frames
            ident = int(thread["ident"], 16)
            frames = []
        elif frame is not None:
            frames.insert(0, (_unescaped(frame["file"]), int(frame["line"]), frame["function"]))

    if ident is not None:
        yield ident, frames


def _unescaped(name: str) -> str:
    # Characters beyond ASCII are written as escapes.
    return re.sub(
        r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))",
        lambda escape: chr(int(escape[1] or escape[2] or escape[3], 16)),
        name,
    )
