"""Trace five of a model's equal blocks, and write the others into the graph as the tracer would
have.

The tracer takes a third of a second for each block of a transformer, and writes the same operations
for all of them. Where blocks turn out to differ, or anything around them does, the whole model must
be traced.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx, nn
from torch.utils._pytree import tree_flatten

from planner.model.capture.operations import MODEL

_TRACED = 5  # two first blocks, which may do more, two that are compared, and the last one
# the second of these stands for those left out
_BEFORE, STANDS, _LAST = _TRACED - 3, _TRACED - 2, _TRACED - 1
_FEWEST = _TRACED + 2  # blocks that make it worth while
_REGISTRIES = ("_modules", "_parameters", "_buffers")


@contextmanager
def shortened(model: nn.Module) -> Iterator[dict[str, list[nn.Module]]]:
    """Leave out all but five blocks of a model's lists of equal ones; give all of them by the path
    of their list.
    """
    lists = {
        path: each
        for path, each in model.named_modules()
        if isinstance(each, (nn.ModuleList, nn.Sequential))
    }
    # Blocks in blocks, such as experts, stay as they are.
    outer = {path: each for path, each in lists.items() if not re.search(r"(^|\.)\d+(\.|$)", path)}
    found = {
        path: list(each)
        for path, each in outer.items()
        if _are_alike(list(each))
        and list(each._modules) == [str(number) for number in range(len(each))]
    }
    for path, blocks in found.items():
        kept = [*blocks[:_LAST], blocks[-1]]
        lists[path]._modules = {str(number): block for number, block in enumerate(kept)}
    try:
        yield found
    finally:
        for path, blocks in found.items():
            lists[path]._modules = {str(number): block for number, block in enumerate(blocks)}


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Return whether blocks after the first two differ in their weights and their own
    number alone.
    """
    if len(blocks) < _FEWEST:
        return False
    weights = [id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())]
    if len(set(weights)) < len(weights):
        return False
    first = _facts(blocks[_BEFORE])
    return all(
        first.keys() == (facts := _facts(block)).keys()
        and all(_are_same(first[key], facts[key], _BEFORE, number) for key in first)
        for number, block in enumerate(blocks[_BEFORE + 1 :], start=_BEFORE + 1)
    )


def _facts(block: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the attributes of a block's modules, and of its weights what the tracer sees
    of them.
    """
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        own = {"type": type(module)} | {
            name: each for name, each in vars(module).items() if name not in _REGISTRIES
        }
        for name, tensor in (module._parameters | module._buffers).items():
            own[name] = (
                None
                if tensor is None
                else (tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad)
            )
        found |= {(path, name): value for name, value in own.items()}
    return found


def _are_same(one: Any, other: Any, number: int, number_of_other: int) -> bool:
    is_number = type(one) is type(other) is int and (one, other) == (number, number_of_other)
    return one is other or is_number or repr(one) == repr(other)


@contextmanager
def noting_nodes() -> Iterator[list[fx.Node]]:
    """Give all that the tracer makes while the context lasts, also what it takes out again: it has
    numbers, too.
    """
    made, create = list[fx.Node](), fx.Graph.create_node

    def noting(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        made.append(create(graph, *args, **kwargs))
        return made[-1]

    with mock.patch.object(fx.Graph, "create_node", noting):
        yield made


def extended(
    module: fx.GraphModule, lists: Mapping[str, Sequence[nn.Module]], made: Sequence[fx.Node]
) -> bool:
    """Write the blocks that were left out into a graph; return False where the traced ones
    differ.
    """

    def first(path: str) -> int:
        return next(
            (
                place
                for place, node in enumerate(module.graph.nodes)
                if _block_of(node, path) is not None
            ),
            0,
        )

    # What is made later has later numbers, and the nodes that were made know the first ones.
    for path in sorted(lists, key=first, reverse=True):
        blocks = lists[path]
        if (graph := _Extension(module, path, blocks, made).graph()) is None:
            return False
        holder = module.get_submodule(f"{MODEL}.{path}")
        for number, block in enumerate(blocks):
            holder.add_module(str(number), block)
        module.graph = graph
    return True


class _Extension:
    """The blocks of one list in a graph."""

    def __init__(
        self,
        module: fx.GraphModule,
        path: str,
        blocks: Sequence[nn.Module],
        made: Sequence[fx.Node],
    ) -> None:
        self._old, self._path, self._count = module.graph, f"{MODEL}.{path}", len(blocks)
        self._nodes = list(module.graph.nodes)
        number = {node: _block_of(node, path) for node in self._nodes}
        traced = range(_TRACED)
        self._own = [[node for node in self._nodes if number[node] == each] for each in traced]
        weights = [(node, str(node.target)) for node in self._nodes if node.op == "get_attr"]
        self._weights = [
            {
                name[len(self._at(each)) :]: node
                for node, name in weights
                if name.startswith(self._at(each))
            }
            for each in traced
        ]
        names = {node.name for node in made if _block_of(node, path) == STANDS}
        numbers = sorted(map(_numbered, names))
        self._highest = dict(numbers)  # in names of the block that stands for others
        # by which numbers in names grow with each block
        self._steps = Counter(base for base, _ in numbers)

    def _at(self, number: int) -> str:
        return f"{self._path}.{number}."

    def graph(self) -> fx.Graph | None:
        """Return the graph with all blocks, or None."""
        own, last = self._own, {node: place for place, node in enumerate(self._nodes)}
        if not all(own) or last[own[_LAST][-1]] - last[own[_BEFORE][0]] + 1 != sum(
            map(len, own[_BEFORE:])
        ):
            return None
        inside = {node for block in own[_BEFORE:] for node in block}
        if any(
            user not in inside
            for block in own[_BEFORE:_LAST]
            for node in block
            for user in node.users
        ):
            return None
        return self._extended() if self._follow(inside) else None

    def _follow(self, inside: Collection[fx.Node]) -> bool:
        """Return whether the last block does with the one before what that does with its own one
        before.
        """
        before, own, after = self._own[_BEFORE:]
        weights = self._weights[_BEFORE:]
        if len({*map(len, (before, own, after))}) > 1 or any(
            each.keys() != weights[0].keys() for each in weights
        ):
            return False
        pairs = dict(zip(before, own, strict=True)) | dict(zip(own, after, strict=True))
        pairs |= {weights[1][name]: weights[2][name] for name in weights[0]}
        for three in zip(before, own, after, strict=True):
            (a, i), (b, j), (c, k) = (_numbered(node.name) for node in three)
            if not (a == b == c and j - i == k - j == self._steps[a]):
                return False
            given = [
                tree_flatten((node.args, dict(node.kwargs)), is_leaf=_is_node) for node in three
            ]
            if len({node.target for node in three}) > 1 or given[1][1] != given[2][1]:
                return False
            for x, y in zip(given[1][0], given[2][0], strict=True):
                if _is_node(x):
                    if pairs.get(x) is not y and (x is not y or x in inside):
                        return False
                elif type(x) is not type(y) or x != y:
                    return False
        return True

    def _extended(self) -> fx.Graph:
        new, copies, left_out = fx.Graph(), dict[fx.Node, fx.Node](), self._count - _TRACED
        stands, last = (
            {*self._own[place], *self._weights[place].values()} for place in (STANDS, _LAST)
        )
        before = dict(zip(self._own[_BEFORE], self._own[STANDS], strict=True))
        added: list[dict[fx.Node, fx.Node]] = [{} for _ in range(left_out)]
        run = list[fx.Node]()
        for node, after in zip(self._nodes, (*self._nodes[1:], None), strict=True):
            base, number = _numbered(node.name)
            is_later = number > self._highest.get(base, number)
            copies[node] = self._put(new, node, copies.__getitem__, left_out if is_later else 0)
            if node in last:
                self._renumber(copies[node], _LAST, self._count - 1)
            run += [node] if node in stands else []
            if not run or after in stands:
                continue
            earlier = copies
            for place, own in enumerate(added):
                taken = (
                    copies
                    | {one: earlier[other] for one, other in before.items() if other in earlier}
                    | own
                )
                for each in run:
                    taken[each] = own[each] = self._put(new, each, taken.__getitem__, place + 1)
                    self._renumber(own[each], STANDS, _LAST + place)
                earlier = own
            copies |= {each: earlier[each] for each in run if each.op != "get_attr"}
            run.clear()
        new.set_codegen(self._old._codegen)
        return new

    def _put(
        self, graph: fx.Graph, node: fx.Node, given: Callable[[fx.Node], fx.Node], blocks: int
    ) -> fx.Node:
        """Copy a node, with the name that it has so many blocks later."""
        put, (base, number) = graph.node_copy(node, given), _numbered(node.name)
        number += blocks * self._steps[base]
        put.name = (
            node.name if node.op != "call_function" else f"{base}_{number}" if number else base
        )
        return put

    def _renumber(self, node: fx.Node, number: int, new: int) -> None:
        if node.op == "get_attr":
            node.target = self._at(new) + str(node.target)[len(self._at(number)) :]
            flat = self._path.replace(".", "_")
            node.name = f"{flat}_{new}_" + node.name[len(f"{flat}_{number}_") :]
        elif "nn_module_stack" in node.meta:
            old = re.compile(re.escape(f"{self._path}.{number}") + r"(?=\.|$)")
            stack = node.meta["nn_module_stack"].items()
            at = f"{self._path}.{new}"
            node.meta["nn_module_stack"] = {
                old.sub(at, key): (old.sub(at, path), kind) for key, (path, kind) in stack
            }


def _block_of(node: fx.Node, path: str) -> int | None:
    """Return which block of the list at a path made a node; None where none did."""
    paths = (
        path.removeprefix("_export_root.")
        for path, _ in node.meta.get("nn_module_stack", {}).values()
    )
    found = (re.match(re.escape(f"{MODEL}.{path}") + r"\.(\d+)(\.|$)", each) for each in paths)
    return next((int(match[1]) for match in found if match), None)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node)


def _numbered(name: str) -> tuple[str, int]:
    """Divide the name of an operation into its kind and the number that the tracer has given it."""
    match = re.fullmatch(r"(.*?)(?:_(\d+))?", name)
    assert match is not None
    return match[1], int(match[2] or 0)
