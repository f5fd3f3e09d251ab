"""Numbers of GPUs to propose plans for."""

from planner.solver.tuning.searches import RestrictedTuning


def counts_to_try(gpus: int, tuning: RestrictedTuning) -> list[int]:
    """Return numbers of GPUs to try, descending.

    These are the highest few, and a series that has every small number and then four in each
    octave: 16, 20, 24, 28, 32, 40, ... It does not depend on the cluster, so that whatever is
    proposed for a cluster is proposed for a larger one, too, and more GPUs never make an answer
    worse.
    """
    dense = tuning.most_dense_gpus
    counts = set(range(max(1, gpus - tuning.nearest_counts + 1), gpus + 1))
    counts.update(range(1, min(dense, gpus + 1)))

    octave = dense
    while octave <= gpus:
        quarters = range(octave, 2 * octave, octave // 4)
        counts.update(count for count in quarters if count <= gpus)
        octave *= 2
    return sorted(counts, reverse=True)
