"""Orders of samples for training, as samplers of PyTorch: any DataLoader takes them, with the
planner or without.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

POOL = 50  # minibatches' samples that are sorted together


class BucketSampler(Sampler[int]):
    """Yields samples so that those of one microbatch, and the microbatches of one minibatch, have
    similar lengths.

    An epoch is shuffled and cut into pools; each pool is sorted by length and cut into minibatches,
    which come in random order. Microbatches are consecutive samples. They are padded less than in
    random order, and a synchronous schedule waits less, because those between two updates take
    about as long (Khomenko et al. 2016, arXiv 1708.05604).

    Args:
        lengths: of each sample, or what else its time grows with.
        batch_size: samples of a microbatch.
        microbatches: per minibatch.
        pool: minibatches' samples that are sorted together: more make lengths more alike and the
            order less random.
        seed: of the order, with the number of the epoch.

    >>> sampler = BucketSampler([3, 9, 4, 8], batch_size=2)
    >>> sorted(sorted(pair) for pair in zip(*[iter(sampler)] * 2))
    [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        microbatches: int = 1,
        *,
        pool: int = POOL,
        seed: int = 0,
    ) -> None:
        if min(batch_size, microbatches, pool) < 1:
            raise ValueError(
                f"batch_size, microbatches and pool are {batch_size}, {microbatches} and {pool}, "
                f"and each is at least 1"
            )

        self._lengths = list(lengths)
        self._minibatch = batch_size * microbatches
        self._pool = pool * self._minibatch
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration have the order of this epoch, which every process finds alike."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        shuffled = torch.randperm(len(self), generator=generator).tolist()
        ordered = [
            index
            for pool in _runs(shuffled, self._pool)
            for index in sorted(pool, key=self._lengths.__getitem__)
        ]

        # What is left for a smaller last minibatch comes last: elsewhere it would move all borders
        # after it.
        whole = len(self) - len(self) % self._minibatch
        minibatches = _runs(ordered[:whole], self._minibatch)
        for place in torch.randperm(len(minibatches), generator=generator).tolist():
            yield from minibatches[place]
        yield from ordered[whole:]


def _runs(indices: Sequence[int], length: int) -> list[Sequence[int]]:
    """Return consecutive runs of so many indices, the last of what is left."""
    return [indices[start : start + length] for start in range(0, len(indices), length)]
