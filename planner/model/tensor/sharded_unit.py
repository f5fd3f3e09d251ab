"""A module whose weights PyTorch's `fully_shard` divides over replicas, and gathers before the
module runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from planner.model.tensor.row_exchange import Exchange


class _ReduceScatter:
    """Sums gradients at their owners for `fully_shard` as `exchange` does."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        rows = input_tensor.view(-1, len(output_tensor))
        self._exchange.reduce_scatter(rows)()
        output_tensor.copy_(rows[self._exchange.own])


POSSIBLE = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")  # with this PyTorch
# whether replicas may use other weights in a backward
UNALIKE_POSSIBLE = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def divide(
    unit: nn.Module,
    mesh: DeviceMesh,
    exchange: Exchange,
    *,
    shards_weights: bool,
    alike: bool = True,
    **options: Any,
) -> FSDPModule:
    """Divide the unit's gradients, and its weights, too, or not.

    Args:
        alike: whether every backward reaches the same weights on all replicas.
        options: of `fully_shard`.
    """
    fully_shard(unit, mesh=mesh, reshard_after_forward=shards_weights, **options)
    assert isinstance(unit, FSDPModule)
    # Gradients add up, as microbatches' do: their losses are weighted. Gloo knows no means.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_reduce_scatter(_ReduceScatter(exchange))  # type: ignore[arg-type]
    if not alike:
        # It packs the gradients that there are, and replicas would add up those of unlike weights.
        unit.set_reduce_scatter_unused_params(True)
    return unit
