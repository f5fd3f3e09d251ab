"""Run the worker of a job: `python -m planner.cli.worker JOB.json`, in the environment that torchrun sets."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from planner.cli.worker.run import die_with_parent, end_process, run_worker
from planner.formats.files import save_record
from planner.profiler.this_machine import keep_freed_pages
from planner.workers.job import Job


def main() -> int:
    """Run the worker that the environment describes."""
    die_with_parent()
    # The launcher reports Ctrl-C; a worker just ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_freed_pages()
    job = Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    code, result = run_worker(job)
    if result is not None and job.result_path is not None:
        save_record(result, Path(job.result_path))
    return code


if __name__ == "__main__":
    end_process(main())
