"""Start workers on this host: `python -m planner.workers.start_here FOLDER WORKERS MODULE
ARGUMENT...`.

A process of its own, for who must end it and its workers after a time. The folder is for torchrun's
files.
"""

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from planner.errors import PlannerError
from planner.workers.interfaces import LOOPBACK, address_of
from planner.workers.launch import launching, start_workers
from planner.workers.secret import SECRET_VARIABLE, new_secret
from planner.workers.signals import ended_by_signals
from planner.workers.store_server import open_store


def main(folder: str, workers: int, command: Sequence[str]) -> int:
    """Start `command`, a module and its arguments, as `workers` processes; return 1 if one of them
    failed.
    """
    store = open_store(address_of(LOOPBACK), 0)
    try:
        with ended_by_signals(), launching(None, **{SECRET_VARIABLE: new_secret()}):
            start_workers(store, workers, command, folder)
    except ChildFailedError:
        return 1
    except PlannerError as error:  # a signal
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code

    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
