"""Signals that end a run while its launcher lives, from the first file that it makes to the last
one it removes.

torchrun's launcher handles signals only once it starts workers, and keeps its handlers when they
have ended. So the same are set for the whole run, and those from before are put back.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from planner.errors import WorkerError

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a run: not those that whoever started this process has it ignore,
    as nohup does.
    """
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let the block be ended by a signal; raise KeyboardInterrupt for Ctrl-C then, and WorkerError
    for others.
    """
    # Python lets no other thread handle signals.
    in_main = threading.current_thread() is threading.main_thread()
    before = {}
    if in_main:
        before = {number: signal.getsignal(number) for number in ending_signals()}
    for number in before:
        signal.signal(number, _raise)
    try:
        yield
    except SignalException as cause:
        # The launcher has ended the workers. Ctrl-C then ends this process as it would any other.
        if cause.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise WorkerError(f"training was ended by {cause.sigval.name}") from None
    finally:
        for number, handler in before.items():
            if handler is not None:  # which Python does not know, and so cannot set
                signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    signals = signal.Signals(number)
    raise SignalException(f"ended by {signals.name}", signals)
