"""Run blocks on the example batch: what each returns, and which must share a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import CaptureError, reason_of
from planner.model.batch import Batch
from planner.model.capture.block_layers import tensors_of
from planner.model.loss import LossFunction, loss_of
from planner.model.state.kept_state import random_state_kept

_CONTRACT = "each block takes what the one before it returned, as in nn.Sequential; see docs/guides/own-model.md"


def _call(name: str, block: nn.Module, value: Any, batch: Batch | None) -> Any:
    """Run a block on `value`, or on the arguments of `batch` if one is given."""
    try:
        return block(*batch.args, **batch.kwargs) if batch is not None else block(value)
    except Exception as cause:  # whatever the user's forward raises
        raise CaptureError(f"block '{name}' fails: {reason_of(cause)}", hint=_CONTRACT) from cause


def joined_by_writes(named: Sequence[tuple[str, nn.Module]], batch: Batch) -> list[tuple[int, int]]:
    """Return spans of blocks whose last one writes into memory that the first one made."""
    spans: list[tuple[int, int]] = []
    makers: dict[int, int] = {}
    alive: list[Any] = []  # freed memory would be given to another value, and look shared
    value: Any = None
    with random_state_kept(torch.device(batch.device_type)):
        for index, (name, block) in enumerate(named):
            taken = tensors_of(value)
            versions = [tensor._version for tensor in taken]  # PyTorch counts in-place changes here
            value = _call(name, block, value, None if index else batch)
            for tensor, version in zip(taken, versions, strict=True):
                if tensor._version != version:
                    spans.append((makers[_storage(tensor)], index))
            for tensor in tensors_of(value):
                makers.setdefault(_storage(tensor), index)
            alive.append(value)
    return spans


def joined_by_buffers(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[int, int]]:
    """Return spans of blocks that share a buffer, whose state must stay in one stage."""
    users: dict[int, list[int]] = {}
    for index, (_, block) in enumerate(named):
        for buffer in block.buffers():
            users.setdefault(id(buffer), []).append(index)
    return [(indices[0], indices[-1]) for indices in users.values()]


def run_blocks(named: Sequence[tuple[str, nn.Module]], batch: Batch, loss: LossFunction | None) -> list[Any]:
    """Return what each block returns, and the loss."""
    results: list[Any] = []
    torch.manual_seed(0)
    for index, (name, block) in enumerate(named):
        results.append(_call(name, block, results[-1] if index else None, None if index else batch))
    return [*results, loss_of(results[-1], batch.target, loss)]


def check_loss(model: nn.Module, batch: Batch, loss: LossFunction | None, found: Tensor) -> None:
    """Check that the blocks' loss is a number that can be trained, and equals the model's.

    Raises:
        CaptureError: otherwise.
    """
    if found.dim() or not found.requires_grad:
        what = "does not depend on the model's parameters" if not found.dim() else "is not a single number"
        raise CaptureError(
            f"the loss {what}", hint="loss(output, target) must return a 0-dimensional tensor made from the output"
        )
    with torch.no_grad():
        torch.manual_seed(0)
        expected = loss_of(model(*batch.args, **batch.kwargs), batch.target, loss)
    if not torch.allclose(found.detach(), expected, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise CaptureError(
            f"the blocks compute another loss than the model on example_batch(): {found.item():.6g} instead of "
            f"{expected.item():.6g}",
            hint=_CONTRACT,
        )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
