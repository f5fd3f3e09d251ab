"""Hand what is in the launching process's memory over to its workers.

Through a socket in a folder that only the user may enter, and only to who knows the secret of the
run. Nothing is written to a file, and workers take nothing else than what their launcher offers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path

SOCKET = "model"  # in the folder of a run


@contextmanager
def handing_over(content: bytes | None, folder: Path, secret: str) -> Iterator[None]:
    """Give `content` to each worker that asks for it, if there is any, while its block runs."""
    if content is None:
        yield
        return

    with Listener(str(folder / SOCKET), family="AF_UNIX", authkey=secret.encode()) as listener:
        thread = threading.Thread(target=_hand_over, args=(listener, content), daemon=True)
        thread.start()
        yield


def _hand_over(listener: Listener, content: bytes) -> None:
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):  # who asked does not belong here
            continue
        except OSError:  # closed, at the end of the run
            return
        with connection, suppress(OSError):  # a worker that has ended
            connection.send_bytes(content)


def take_over(folder: Path, secret: bytes) -> bytes:
    """Return what the launching process of this worker offers."""
    with Client(str(folder / SOCKET), family="AF_UNIX", authkey=secret) as connection:
        return connection.recv_bytes()
