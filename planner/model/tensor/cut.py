"""How a dimension is divided over ranks: every block of it is, and a rank has its part of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Along which dimension a tensor is divided, and the blocks of it that are divided each.

    Attributes:
        dimension: its number.
        blocks: their sizes in the whole, such as those of query, key and value; none where the dimension is one block.
    """

    dimension: int
    blocks: tuple[int, ...] = ()

    def part(self, whole: Tensor, place: int, of: int) -> Tensor:
        """Return one of so many ranks' part."""
        blocks = torch.split(whole, self._sizes(whole.shape[self.dimension]), self.dimension)
        return torch.cat([block.chunk(of, self.dimension)[place] for block in blocks], self.dimension)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which these are all ranks' parts, in the order of the ranks."""
        total = sum(part.shape[self.dimension] for part in parts)
        sizes = [size // len(parts) for size in self._sizes(total)]
        blocks = zip(*(torch.split(part, sizes, self.dimension) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block], self.dimension)

    def divides(self, size: int, of: int) -> bool:
        """Return whether so many ranks have parts of equal size."""
        return not any(each % of for each in self._sizes(size))

    def _sizes(self, size: int) -> list[int]:
        return list(self.blocks) or [size]
