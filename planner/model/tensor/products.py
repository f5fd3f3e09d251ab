"""The products that ranks can divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten


class Product(NamedTuple):
    """Where a product has its weight, which follows the value that it multiplies, and what the dimensions are."""

    weight: int  # place among the arguments
    outputs: int  # dimension of the weight
    inputs: int


PRODUCTS: Mapping[Any, Product] = {
    _aten.linear.default: Product(1, 0, 1),
    _aten.addmm.default: Product(2, 1, 0),
    _aten.mm.default: Product(1, 1, 0),
    _aten.matmul.default: Product(1, 1, 0),
}
