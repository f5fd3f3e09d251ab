"""The store of a run on several hosts, as its workers reach it: it outlives every start of theirs.

Each start has a store of its own, by which its workers meet. The store at `rendezvous`, where the
hosts meet, stays for as long as the run does, so what one start tells another one stands there.
"""

from datetime import timedelta

# PyTorch exports both by a star import.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import WorkerError, first_line
from planner.workers.job import Job
from planner.workers.secret_store import Part, protected

_TIMEOUT = timedelta(minutes=1)  # for an answer


def run_store(job: Job) -> Store:
    """Return the part of the store at `rendezvous` that the workers of a run have; raise
    WorkerError without one.
    """
    place = str(job.elastic.rendezvous)
    host, _, port = place.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    except RuntimeError as cause:
        raise WorkerError(
            f"the store at {place}, where hosts meet, is not reached: {first_line(cause)}",
            hint="its host or the link to it is down",
        ) from cause

    return Part(f"workers of {job.run}", protected(store))
