"""Parts of tensors whose blocks are divided each, and the wholes that they make."""

from __future__ import annotations

import pytest
import torch

from planner.model.tensor.dimensions import Cut


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("blocks", [(), (8, 8, 8), (16, 4, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_has_its_part_of_every_block(
    dimension: int, blocks: tuple[int, ...], ranks: int
) -> None:
    """Against the rows that a rank has by their numbers."""
    whole, cut = torch.arange(24.0 * 24).view(24, 24), Cut(dimension, blocks)
    starts = [sum(blocks[:place]) for place in range(len(blocks))] or [0]
    parts = []
    for rank in range(ranks):
        rows = [
            start + row
            for start, size in zip(starts, blocks or (24,), strict=True)
            for row in range(size)
            if row * ranks // size == rank
        ]
        parts.append(cut.part(whole, rank, ranks))
        assert torch.equal(parts[-1], whole.index_select(dimension, torch.tensor(rows)))
    assert torch.equal(cut.whole(parts), whole)
    assert cut.divides(24, ranks)
    assert not cut.divides(24, 5)
