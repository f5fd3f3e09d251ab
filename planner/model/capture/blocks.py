"""Capture a model as a sequence of modules that its file names: for what no tracer captures, such as `if` on a tensor.

The blocks run as they are, so they may do anything. Running them on the example batch shows what crosses from one to
the next, and which must share a layer. The resulting graph has one opaque operation per block, so cuts, stages, plans
and schedules work as on a traced graph.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.errors import CaptureError, ModelFileError, PlannerError, first_line, reason_of
from planner.model.batch import Batch
from planner.model.capture.block_graph import BlockGraph
from planner.model.capture.failure import decides_by_values, refuse_untrainable
from planner.model.capture.fake import fake_batch, fake_device, fake_modules, pretended
from planner.model.capture.graph import LayerGraph, tensors_of
from planner.model.loss import loss_of
from planner.model.options import PLAIN, ModuleOptions, autocasting, lay_out
from planner.model.randomness import keep_state, random_state_kept
from planner.model.spec import LossFunction

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


def capture_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batch: Batch,
    loss: LossFunction | None,
    *,
    options: ModuleOptions = PLAIN,
    values: bool = True,
) -> LayerGraph:
    """Return the graph of `blocks`, each a layer, followed by the loss.

    The blocks are run on `batch`, and on twice as many samples to see which sizes depend on the batch; weights, buffers
    and random state are left as they were. A block that changes its input in place shares a layer with the block that
    made it, and so do blocks that share a buffer.

    Args:
        model: with the blocks as parts, in training or evaluation mode; it must compute the same loss as they do.
        blocks: the first takes the batch's arguments, each other one takes what the one before it returned, and the
            last returns the model's output.
        batch: example.
        values: whether the weights have values. Without, the blocks run on tensors without data: nothing is computed,
            and that the loss is the model's is not checked.

    Raises:
        CaptureError: when the blocks fail, compute something else than the model, or exchange what cannot travel.
        ModelFileError: without values, when a block decides by them.
    """
    refuse_untrainable(model)
    example = batch.doubled() if batch.size == 1 else batch
    if options.channels_last:
        lay_out(model)
        example = example.channels_last()
    named = _named(model, blocks)
    buffers = joined_by_buffers(named)
    with keep_state(model), autocasting(example.device_type, options.autocast):
        if values:
            joined, small, large = _run(named, example, loss)
            check_loss(model, example, loss, small[-1])
        else:
            joined, small, large = _run_without_values(named, example, loss)
    graph = BlockGraph(model, named, example, loss, options).build(small, large, [*joined, *buffers])
    if options.device != "cuda" or options.autocast is None:
        return graph
    # Autocast on CUDA leaves other dtypes. The hash is the same for each device that the model may train on.
    joined, small, large = _run_on_cuda(named, example, loss, options.autocast)
    there = BlockGraph(model, named, example, loss, options).build(small, large, [*joined, *buffers])
    return replace(there, hash=graph.hash)


def _run(
    named: Sequence[tuple[str, nn.Module]], example: Batch, loss: LossFunction | None
) -> tuple[list[tuple[int, int]], list[Any], list[Any]]:
    """Return the spans of blocks that share memory, and what the blocks return for the batch and for it twice."""
    joined = joined_by_writes(named, example)
    small, large = (run_blocks(named, sample, loss) for sample in (example, example.doubled()))
    return joined, small, large


def _run_without_values(
    named: Sequence[tuple[str, nn.Module]],
    example: Batch,
    loss: LossFunction | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
) -> tuple[list[tuple[int, int]], list[Any], list[Any]]:
    """Return what `_run` returns, by copies of the blocks on tensors without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        fakes = fake_modules([block for _, block in named], mode, device)
        with mode:
            renamed = [(name, fake) for (name, _), fake in zip(named, fakes, strict=True)]
            return _run(renamed, fake_batch(example, device), loss)
    except (PlannerError, RuntimeError) as error:
        if not decides_by_values(error):
            raise
        cause = error.__cause__ or error
        raise ModelFileError(
            f"blocks(model) decide by values, and so need their weights to be captured: {first_line(cause)}",
            hint="train without `defer_weights`",
        ) from error


def _run_on_cuda(
    named: Sequence[tuple[str, nn.Module]], example: Batch, loss: LossFunction | None, autocast: torch.dtype
) -> tuple[list[tuple[int, int]], list[Any], list[Any]]:
    """Return what `_run` returns, by copies of the blocks on CUDA under autocast; without data where they need none."""
    device = fake_device("cuda")
    try:
        with pretended("cuda"), autocasting("cuda", autocast):
            return _run_without_values(named, example, loss, device)
    except ModelFileError as error:
        if not torch.cuda.is_available():
            raise CaptureError(
                "blocks(model) decide by values, so their dtypes under autocast on CUDA cannot be told without a GPU",
                hint="profile in float32, or on a machine with a GPU",
            ) from error
    copies = copy.deepcopy([block for _, block in named])  # together, so that what they share stays shared
    moved = [(name, block.to(device)) for (name, _), block in zip(named, copies, strict=True)]
    with autocasting("cuda", autocast):
        return _run(moved, example.to(device), loss)


def _named(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if not isinstance(blocks, (list, tuple, nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise CaptureError(
            f"blocks(model) returned a {type(blocks).__name__}, not a list of modules", hint="return a list of modules"
        )
    paths = {module: path for path, module in model.named_modules() if path}
    named: list[tuple[str, nn.Module]] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise CaptureError(
                f"block {index} of blocks(model) is a {type(block).__name__}, not a module",
                hint="write an nn.Module that does in its forward what happens between two modules",
            )
        _check_owned(index, block, model)
        name = base = paths.get(block, f"blocks.{index}")
        number = 2
        while any(name == other for other, _ in named):
            name, number = f"{base}_{number}", number + 1
        named.append((name, block))
    return named


def _check_owned(index: int, block: nn.Module, model: nn.Module) -> None:
    modules = set(model.modules())
    parameters = {id(parameter) for parameter in model.parameters()}
    for path, part in block.named_modules():
        if part in modules:
            continue
        foreign = [name for name, p in part._parameters.items() if p is not None and id(p) not in parameters]
        # Refused even if the model has it too: moving the stage to a device would leave this module's buffer behind.
        foreign += [name for name, buffer in part._buffers.items() if buffer is not None]
        if foreign:
            name = f"{path}.{foreign[0]}" if path else foreign[0]
            raise CaptureError(
                f"block {index} of blocks(model) has a parameter or buffer of its own, '{name}'",
                hint="make all parameters and buffers in build_model(); blocks() only groups the modules",
            )
