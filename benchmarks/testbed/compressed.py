"""Compare predictions with measurements of drawn plans whose stages compress what they send. See
README.md here.

python -m benchmarks.testbed.compressed --seed 1 --save
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from math import prod

from benchmarks.testbed import drawn
from benchmarks.testbed.cases import Case
from benchmarks.testbed.emulate import LINK_BYTES_PER_S
from planner.formats.names import CODECS

RATES = (80, 100, 200, 300)  # Mbit/s of the slowest links
MOST_DEVICES = 8
CODED = [name for name in CODECS if name != "none"]


def main() -> None:
    """Draw cases, run them, print the table, and save it if asked."""
    drawn.compare_cases(__doc__, "compressed", draw, cases=24)


def draw(seed: int, count: int) -> list[Case]:
    """Return random cases: the same ones for the same seed, and the first ones of a longer list."""
    return list(islice(_endless(seed), count))


def _endless(seed: int) -> Iterator[Case]:
    """Yield cases of `drawn` that have several stages, with slow links and a codec."""
    rng = random.Random(seed)
    for case in drawn.endless(seed):
        several = case.chunks > 1 or (case.config is not None and len(case.config) > 1)
        if several and prod(case.sizes) <= MOST_DEVICES:
            rate = rng.choice(RATES)
            # Links within servers stay as many times faster as they were drawn.
            faster = 2 * LINK_BYTES_PER_S / case.link_bytes_per_s
            rates = (
                (f"{rate}Mbps",)
                if len(case.sizes) == 1
                else (f"{rate * faster:g}Mbps", f"{rate}Mbps")
            )
            yield case.given(bandwidths=rates, compress=rng.choice(CODED))


if __name__ == "__main__":
    main()
