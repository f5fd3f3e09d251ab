"""The fused kernels of Megatron and Apex, which the published runs used.

They fuse scaling and masks into softmax, the residual's addition into dropout, the gate into SiLU,
and what turns queries and keys by their positions (rotary embeddings), and nothing else. GELU with
its bias, and layer norm, are one operation each already: products add the bias. The optimizer is
one kernel, too, as PyTorch's own with `fused=True`.

The softmax is fused only for some sizes (Megatron-LM 3.0, `fused_softmax.py`,
`is_kernel_available`): 17 to 4,096 keys, before May 2022 to 2,048, queries in fours, and heads of
all samples in fours.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.profiler.estimated.execution import Flow

_ROTARY = frozenset({"mul", "neg", "cat", "add"})
_AROUND_SOFTMAX = frozenset({"mul", "div", "masked_fill", "where", "add", "_to_copy"})
_MOST_KEYS = 4096
_FEW_KEYS = 16
_TOGETHER = 4  # rows, and heads of all samples, that a block of the kernel takes


def megatron(flow: Flow) -> list[str | None]:
    """Name the kernel that each operation may be part of; see
    `planner.profiler.estimated.execution.Fusion`.
    """
    kernels: list[str | None] = [None] * len(flow.operations)
    for number in _around_attention(flow):
        kernels[number] = "rotary"
    for number in reversed(range(flow.backward)):
        name = flow.operations[number].name
        if name == "_softmax" and _has_fused_softmax(flow, number):
            kernels[number] = "softmax"
        elif name in _AROUND_SOFTMAX:
            users = [user for user in flow.users(number) if user < flow.backward]
            if users and all(kernels[user] == "softmax" for user in users):
                kernels[number] = "softmax"
    for number, operation in enumerate(flow.operations):
        name, producers = operation.name, flow.producers(number)
        names = {flow.operations[each].name for each in producers}
        backward_of_softmax = any(kernels[each] == "softmax backward" for each in producers)
        if name == "native_dropout" or (name == "add" and "native_dropout" in names):
            kernels[number] = "dropout"
        elif kernels[number] == "rotary":
            continue
        elif name == "silu" or (name == "mul" and "silu" in names):
            kernels[number] = "gate"
        elif name == "_softmax_backward_data":
            if any(kernels[each] == "softmax" for each in producers):
                kernels[number] = "softmax backward"
        elif name in _AROUND_SOFTMAX and backward_of_softmax:
            kernels[number] = "softmax backward"
    return kernels


def _has_fused_softmax(flow: Flow, number: int) -> bool:
    """Return whether there is a kernel for the scores that a softmax normalises."""
    operation = flow.operations[number]
    while operation.product is None:
        producers = flow.producers(number)
        if not producers:
            return True  # of no product: of a loss, around which nothing is fused
        number = max(producers)
        operation = flow.operations[number]
    heads, queries, keys, _ = operation.product
    sizes = queries % _TOGETHER == 0 and heads % _TOGETHER == 0
    return sizes and _FEW_KEYS < keys <= _MOST_KEYS


def _around_attention(flow: Flow) -> Iterator[int]:
    """Yield what turns queries and keys before fused attention, and their gradients after it."""
    seen = set[int]()
    for number, operation in enumerate(flow.operations):
        if operation.name.startswith("_scaled_dot_product"):
            following = flow.users if operation.name.endswith("backward") else flow.producers
            todo = following(number)
            while todo:
                each = todo.pop()
                if each not in seen and flow.operations[each].name in _ROTARY:
                    seen.add(each)
                    todo += following(each)
                    yield each
