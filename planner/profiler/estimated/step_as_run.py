"""A recorded step as an execution runs it: what is fused, what is in 8 bits, and what memory that
takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from planner.formats.files import replace
from planner.profiler.estimated.eight_bits import in_eight_bits
from planner.profiler.estimated.execution import Execution, Flow, first_of_kernel, fused
from planner.profiler.estimated.experts import with_experts_of_one_rank
from planner.profiler.estimated.fused_attention import Mask, with_fused_attention
from planner.profiler.estimated.kept import Held, held_fused, held_unfused
from planner.profiler.estimated.loss_chunks import in_chunks
from planner.profiler.estimated.operations import Operation


class Span(NamedTuple):
    """The operations of a layer's forward or backward: the first, and the one after the last."""

    layer: int
    in_backward: bool
    start: int
    end: int


@dataclass(frozen=True)
class RecordedStep:
    """A step as PyTorch ran it.

    Attributes:
        operations: in the order in which they ran.
        until: how many of them ran before each mark.
        backward: number of the first operation of the backward.
        spans: of layers.
        saved_bytes, workspace_bytes: of each layer.
    """

    operations: Sequence[Operation]
    until: Sequence[int]
    backward: int
    spans: Sequence[Span]
    saved_bytes: Sequence[int]
    workspace_bytes: Sequence[int]


@dataclass(frozen=True)
class StepAsRun:
    """A step as an execution runs it.

    Attributes:
        operations, unfused: with what is fused, and without; both with the same marks.
        until: how many there are before each mark.
        saved_bytes, workspace_bytes: of each layer.
    """

    operations: Sequence[Operation]
    unfused: Sequence[Operation]
    until: Sequence[int]
    saved_bytes: list[int]
    workspace_bytes: list[int]


def as_run(recorded: RecordedStep, how: Execution, mask: Mask) -> StepAsRun:
    """Return what an execution makes of a recorded step.

    Args:
        recorded: the step.
        how: it is run.
        mask: of attention that the model writes out.
    """
    plain = list(recorded.operations)
    if how.expert_ranks > 1:
        plain = with_experts_of_one_rank(plain, how.expert_ranks)
    if how.fuses_attention:
        plain = with_fused_attention(plain, recorded.backward, mask)
    operations = fused(plain, recorded.backward, how.fusion)
    more_saved = [0.0] * len(recorded.saved_bytes)
    more_workspace = [0] * len(recorded.saved_bytes)
    if how.keeps_inputs:
        more_saved, more_workspace = _memory(recorded, plain, how)

    step = StepAsRun(operations, plain, recorded.until, [], [])
    if how.eight_bits is not None:
        quantized = in_eight_bits(operations, recorded.until, recorded.backward, how.eight_bits)
        unfused = in_eight_bits(plain, recorded.until, recorded.backward, how.eight_bits)
        step = replace(
            step,
            operations=quantized.operations,
            unfused=unfused.operations,
            until=quantized.until,
        )
        for number, size_bytes in quantized.saved_bytes.items():
            more_saved[_layer_of(recorded, number)] += size_bytes

    return replace(
        step,
        saved_bytes=_added(recorded.saved_bytes, more_saved),
        workspace_bytes=[
            max(0, size + more)
            for size, more in zip(recorded.workspace_bytes, more_workspace, strict=True)
        ],
    )


def mask_of(model: nn.Module) -> Mask:
    """Return what a model's written-out attention masks, as its modules and configuration say it:
    the names are those of transformers.
    """
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    config = getattr(model, "config", None)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not isinstance(window, int):
        return Mask(causal)
    return Mask(causal, tuple(window if "sliding" in kind else None for kind in kinds))


def _memory(
    recorded: RecordedStep, operations: Sequence[Operation], how: Execution
) -> tuple[list[float], list[int]]:
    """Return the bytes that each layer saves more where kernels are fused, and those of its
    workspace.
    """
    before = Flow(recorded.operations, recorded.backward)
    if how.loss_chunks > 1:
        operations = in_chunks(operations, recorded.backward, how.loss_chunks)
    after = Flow(operations, recorded.backward)
    names = how.fusion(after) if how.fusion is not None else [None] * len(operations)
    kernels = first_of_kernel(after, names)
    plain = held_unfused(before)
    lean = held_fused(after, kernels, lambda number: names[number] is not None)
    saved = [0.0] * len(recorded.saved_bytes)
    for flow, held, sign in ((before, plain, -1), (after, lean, 1)):
        for value, size in held.kept.items():
            saved[_layer_of(recorded, flow.writer[value])] += sign * size

    largest = [_most(recorded, each) for each in (plain, lean)]
    workspace = [lean_bytes - plain_bytes for plain_bytes, lean_bytes in zip(*largest, strict=True)]
    return saved, workspace


def _most(recorded: RecordedStep, held: Held) -> list[int]:
    """Return the most bytes that each layer holds besides what is kept."""
    most = [0] * len(recorded.saved_bytes)
    for layer, _, start, end in recorded.spans:
        most[layer] = max(most[layer], max(held.peaks[start:end], default=0))
    return most


def _layer_of(recorded: RecordedStep, number: int) -> int:
    """Return the layer of an operation of the forward; the first one's for what is before it."""
    layer = 0
    for span in recorded.spans:
        if not span.in_backward and span.start <= number:
            layer = span.layer
    return layer


def _added(sizes: Sequence[int], more: Sequence[float]) -> list[int]:
    """Return the sizes with what is added to each.

    What is taken from a layer that has less of it is taken from the next one: the layer that makes
    a value and the one that saves it may be two.
    """
    result = []
    missing = 0.0
    for size, added in zip(sizes, more, strict=True):
        now = size + added + missing
        missing = min(0.0, now)
        result.append(round(max(0.0, now)))
    return result
