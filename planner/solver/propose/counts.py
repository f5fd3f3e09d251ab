"""Numbers of GPUs to propose plans for."""

DENSE = 16  # every number up to this is tried; larger pipelines take longer to simulate
NEAR = 4  # numbers from the cluster's own down, likewise


def counts_to_try(gpus: int) -> list[int]:
    """Return numbers of GPUs to try, descending.

    Above `DENSE` these are four in each octave: 16, 20, 24, 28, 32, 40, ... The series does not depend on the cluster,
    so that whatever is proposed for a cluster is proposed for a larger one, too, and more GPUs never make an answer
    worse.
    """
    counts = set(range(max(1, gpus - NEAR + 1), gpus + 1))
    counts.update(range(1, min(DENSE, gpus + 1)))

    octave = DENSE
    while octave <= gpus:
        quarters = range(octave, 2 * octave, octave // 4)
        counts.update(count for count in quarters if count <= gpus)
        octave *= 2
    return sorted(counts, reverse=True)
