"""What a launched worker runs: `python -m planner.executor.start JOB.json`.

Nothing but the standard library is imported before signals are set: a signal that arrives while the
rest is imported ends the process, and leaves no traceback.
"""

import gc
import signal
import sys
from typing import NoReturn


def main(job_path: str) -> NoReturn:
    """Run one of the workers that `planner.executor.worker.launch` starts."""
    # The launcher reports Ctrl-C; a worker just ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from planner.streams import prepare_streams

    prepare_streams()  # a script that closed them may have started this run

    from planner.executor.worker import work
    from planner.workers.ending import end_process

    # A collection looks at all objects, of which most are those of modules, and stay: without them
    # it takes milliseconds, in a move to another plan three times.
    gc.freeze()
    end_process(work(job_path))


if __name__ == "__main__":
    main(sys.argv[1])
