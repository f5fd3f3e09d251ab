"""Experts that ranks divide across servers, as Megatron does: planned and priced, not trained here.

Each of e ranks has a part of a microbatch's samples, an e-th of the experts, and all other weights
whole (Lepikhin et al., "GShard", 2021, section 3.1). With R rows of h numbers that a rank's tokens
send to experts, and G bytes of gradients that all ranks have alike:

    forward    R·h to the ranks of the experts, and R·h back: two all-to-alls
    backward   the same two again
    update     G summed over the group, once; each rank steps an e-th of what all have, as
               Megatron's distributed optimizer does, and gathers the rest

Tokens choose all experts alike often, so that each rank computes as much as with all experts and
its own samples. `planner.cost.tensor` prices the all-to-alls over both levels of links.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from planner.formats.files import replace
from planner.formats.profile import DEGREE_COLUMNS, DegreeCosts, Profile
from planner.profiler.estimated.execution import Flow
from planner.profiler.estimated.operations import Operation
from planner.profiler.step.counters import GROUPED

_STACKED = 3  # dimensions of the matrices of all experts


@dataclass(frozen=True)
class ExpertLayer:
    """What a layer has of a mixture of experts.

    Attributes:
        experts: how many there are.
        sent_bytes: of rows that a forward sends to experts and back.
        exchanges: all-to-alls of a forward.
        rows: of tokens, one for each expert that a token chooses.
    """

    experts: int = 0
    sent_bytes: int = 0
    exchanges: float = 0.0
    rows: int = 0


def expert_operations(
    operations: Sequence[Operation], backward: int
) -> Iterator[tuple[int, ExpertLayer]]:
    """Yield the grouped products of a forward, by number, with what each of them sends: the first
    of an expert's layers gets rows, and the last one gives them back.
    """
    flow = Flow(operations, backward)
    for number, operation in enumerate(operations[:backward]):
        if not operation.name.startswith(GROUPED) or operation.product is None:
            continue
        sent = []
        if not _reaches(flow, number, forward=False):
            sent.append(operation.reads[0][1])
        if not _reaches(flow, number, forward=True):
            sent.append(operation.writes[0][1])
        experts, each, _, _ = operation.product
        yield number, ExpertLayer(experts, sum(sent), float(len(sent)), experts * each)


def with_experts_of_one_rank(operations: Sequence[Operation], ranks: int) -> list[Operation]:
    """Return a step's operations with grouped products as one of so many ranks has them: as many
    rows, for a part of the experts, whose matrices alone it reads, and whose gradients it writes.
    """
    return [
        _of_one_rank(operation, ranks) if operation.name.startswith(GROUPED) else operation
        for operation in operations
    ]


def _of_one_rank(operation: Operation, ranks: int) -> Operation:
    """Return a rank's part of an operation on the matrices of all experts."""
    if operation.product is None:
        gradient_bytes = sum(size for _, size in operation.writes)
        return replace(operation, bytes=operation.bytes - _elsewhere(gradient_bytes, ranks))

    # A rank has a part of the experts, and the rows of all ranks for them.
    experts, rows, columns, inner = operation.product
    rows_read, matrices, *others = operation.reads
    value, matrix_bytes = matrices
    return replace(
        operation,
        product=(max(1, experts // ranks), rows * ranks, columns, inner),
        bytes=operation.bytes - _elsewhere(matrix_bytes, ranks),
        reads=(rows_read, (value, matrix_bytes // ranks), *others),
    )


def _elsewhere(size: int, ranks: int) -> float:
    """Return the bytes of a divided value that the other ranks have."""
    return size * (1 - 1 / ranks)


def _reaches(flow: Flow, start: int, *, forward: bool) -> bool:
    """Return whether a grouped product leads to another one of the forward, or comes from one,
    without other products between them, nor what takes rows from tokens or brings them back.
    """
    seen = {start}
    todo = _next_to(flow, start, forward=forward)
    while todo:
        number = todo.pop()
        if number in seen or number >= flow.backward:
            continue
        seen.add(number)
        operation = flow.operations[number]
        if operation.name.startswith(GROUPED):
            return True
        if not operation.flops and operation.op_class != "gather":
            todo += _next_to(flow, number, forward=forward)

    return False


def _next_to(flow: Flow, number: int, *, forward: bool) -> list[int]:
    if forward:
        return flow.users(number)
    return flow.producers(number)


def shares_of_experts(weights: Sequence[Mapping[str, nn.Parameter]], experts: int) -> list[float]:
    """Return the part of each layer's weights that experts have: matrices, one for each expert, and
    what else has one part for each in the module of such matrices.
    """
    modules = {
        name.rpartition(".")[0]
        for named in weights
        for name, each in named.items()
        if each.dim() == _STACKED and each.shape[0] == experts
    }
    shares = []
    for named in weights:
        total = sum(each.numel() for each in named.values())
        own = sum(
            each.numel()
            for name, each in named.items()
            if name.rpartition(".")[0] in modules and each.shape[:1] == (experts,)
        )
        shares.append(own / total if total else 0.0)

    return shares


def summed_layers(own: Sequence[ExpertLayer]) -> ExpertLayer:
    """Return what a layer of several grouped products has."""
    return ExpertLayer(
        experts=max((each.experts for each in own), default=0),
        sent_bytes=sum(each.sent_bytes for each in own),
        exchanges=sum(each.exchanges for each in own),
        rows=max((each.rows for each in own), default=0),
    )


@dataclass(frozen=True)
class ExpertShare:
    """Of a layer's weights, and of their gradients and optimizer's state, the part that experts
    have.
    """

    layer: ExpertLayer
    share: float


def expert_costs(
    rank: Profile, degree: int, layers: Sequence[ExpertShare], *, sends_once: bool
) -> DegreeCosts:
    """Return what one of so many ranks does and holds.

    Args:
        rank: the profile of one rank's samples, with the products of its experts, and the weights
            of all.
        degree: ranks.
        layers: what is experts' of each layer.
        sends_once: a token is sent to each server once, for all its experts there.
    """
    columns = {name: [getattr(layer, name) for layer in rank.layers] for name in DEGREE_COLUMNS}
    for name in ("weight_bytes", "gradient_bytes"):
        columns[name] = [
            round(size * (1 - own.share + own.share / degree))
            for size, own in zip(columns[name], layers, strict=True)
        ]

    columns["accumulate_s"] = [
        seconds * (1 - own.share + own.share / degree)
        for seconds, own in zip(columns["accumulate_s"], layers, strict=True)
    ]
    # All that is stepped is divided, what experts have and what all have alike.
    columns["optimizer_bytes"] = [-(-size // degree) for size in columns["optimizer_bytes"]]
    columns["update_s"] = [seconds / degree for seconds in columns["update_s"]]
    sent = [own.layer.sent_bytes // 2 for own in layers]  # an all-to-all is half an all-reduce
    exchanges = [own.layer.exchanges for own in layers]
    alike = [
        round(layer.gradient_bytes * (1 - own.share))
        for layer, own in zip(rank.layers, layers, strict=True)
    ]
    own_columns: dict[str, Any] = {name: tuple(column) for name, column in columns.items()}
    return DegreeCosts(
        degree=degree,
        source="estimated",
        by_samples=True,
        experts=tuple(own.layer.experts for own in layers),
        alike_bytes=tuple(alike),
        copies=_copies(rank, layers) if sends_once else None,
        forward_reduced_bytes=tuple(sent),
        backward_reduced_bytes=tuple(sent),
        forward_reduces=tuple(exchanges),
        backward_reduces=tuple(exchanges),
        **own_columns,
    )


def _copies(rank: Profile, layers: Sequence[ExpertShare]) -> float | None:
    """Return how many experts a token chooses; None where that is not known."""
    tokens = (rank.microbatch_size or 1) * (rank.tokens_per_sample or 0)
    rows = max((own.layer.rows for own in layers), default=0)
    if not tokens or rows <= tokens:
        return None
    return rows / tokens


def fewest_experts(layers: Sequence[ExpertShare]) -> int:
    """Return the experts of the layer with the fewest; 0 where no layer has any weights of them."""
    if not any(own.share for own in layers):
        return 0
    return min((own.layer.experts for own in layers if own.layer.experts), default=0)
