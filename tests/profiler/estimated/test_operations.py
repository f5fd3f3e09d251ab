"""What reads what in a recorded step."""

from __future__ import annotations

import torch

from planner.profiler.estimated.operations import OperationRecorder
from planner.runtime import address_of


def test_new_storages_are_none_of_the_values_that_were_at_their_address() -> None:
    """Who makes them, as a collective, is not listed. Else a value of the forward would seem to be
    kept for whoever reads them, and which one would depend on the allocator.
    """
    for _ in range(1000):
        with OperationRecorder() as recorder:
            made = torch.ones(8).exp()
            address = address_of(made)
            del made
            others = [torch.empty(8) for _ in range(8)]
            reused = [each for each in others if address_of(each) == address]
            if not reused:
                continue
            reused[0].neg()
        first, last = recorder.operations[-2:]
        assert (first.name, last.name) == ("exp", "neg")
        (written,), (read,) = first.writes, last.reads
        assert read[0] != written[0]
        assert read[0] < 0, "nobody wrote it"
        return
    raise AssertionError("no address was used twice")
