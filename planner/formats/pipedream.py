"""Read and write profiles in the format of those that PipeDream published, graph.txt.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.19, backward_compute_time=5.348, activation_size=[6.0; 1.0], ...
    <TAB>node6 -- node7

Times are in milliseconds, sizes in bytes; a list of sizes means their sum. Lines may come in any order. Sources whose
description starts with "Input" are data, which every stage reads by itself, and unused `__getitem__` nodes are
bookkeeping: both are left out, as in the published optimizer. The format has no batch size, no dtype and no tied
parameters, so such a profile is enough for planning but not for training.
"""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import ProfileError
from planner.formats.profile import REMEDY, Device, Edge, Layer, Profile, Provenance, Value
from planner.version import __version__

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_HINT = "a line is 'node1 -- Conv2d(...) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=3.0, \
parameter_size=4.0', or an edge: a tab and 'node1 -- node2'"


@dataclass(frozen=True)
class _Node:
    name: str
    description: str
    numbers: Mapping[str, float]


def is_graph_txt(path: Path) -> bool:
    """Return whether the file's first line looks like a node of that format."""
    try:
        with path.open(encoding="utf-8") as file:
            return re.match(r"[^\s{\[\"]+ -- ", file.read(4096).lstrip()) is not None
    except (OSError, UnicodeDecodeError):
        return False  # loading it will say what is wrong


def load_graph_txt(path: Path) -> Profile:
    """Read a published profile; raise ProfileError naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ProfileError(f"'{path}' cannot be read: {cause}", hint=REMEDY) from None
    nodes, edges = _parse(path, lines)
    nodes, edges = _without_bookkeeping(nodes, edges)
    if not nodes:
        raise ProfileError(f"'{path}' holds no layers", hint=_HINT)
    used = {source for source, _ in edges}
    layers = tuple(_layer(nodes[name], name in used) for name in _execution_order(path, nodes, edges))
    position = {layer.name: index for index, layer in enumerate(layers)}
    ordered = sorted(edges, key=lambda edge: (position[edge[0]], position[edge[1]]))
    return Profile(
        model=path.stem,
        device=Device(kind="unknown", name="unknown"),
        layers=layers,
        edges=tuple(Edge(source=source, value=source, target=target) for source, target in ordered),
        provenance=Provenance(tool=f"planner {__version__}, from '{path.name}'", source="imported"),
    )


def graph_txt(profile: Profile) -> str:
    """Return `profile` in PipeDream's format, for its optimizer and tools that read it.

    The format has one backward time per layer, which includes the optimizer's step, and one output size. If a layer's
    values go to different layers, each gets a `__getitem__` node. The format cannot say that a value has no gradient.
    """
    if profile.provenance.source == "imported":
        names = {layer.name: layer.name for layer in profile.layers}
    else:
        names = {layer.name: f"node{number}" for number, layer in enumerate(profile.layers, 1)}
    users: dict[tuple[str, str], set[str]] = {}
    for edge in profile.edges:
        users.setdefault((edge.source, edge.value), set()).add(edge.target)
    nodes: list[str] = []
    edges: list[tuple[str, str]] = []
    for layer in profile.layers:
        node = names[layer.name]
        nodes.append(_node_line(profile, layer, node))
        targets = [users.get((layer.name, value.name), set()) for value in layer.outputs]
        parts = len(targets) > 1 and any(used != targets[0] for used in targets)
        for index, (value, used) in enumerate(zip(layer.outputs, targets, strict=True)):
            source = f"{node}_{index}" if parts else node
            if parts:
                nodes.append(_line(source, f"__getitem__({index})", 0.0, 0.0, str(value.output_bytes), 0))
                edges.append((node, source))
            edges += [(source, names[target]) for target in used]
    position = {name: index for index, name in enumerate(names.values())}
    edges = sorted(set(edges), key=lambda edge: [(position.get(n.partition("_")[0], -1), n) for n in edge])
    return "".join(f"{line}\n" for line in nodes) + "".join(f"\t{a} -- {b}\n" for a, b in edges)


def _node_line(profile: Profile, layer: Layer, node: str) -> str:
    description = layer.op if layer.name == node else f"{layer.op}({layer.name})"
    description = re.sub(r"\s+", " ", description).replace(" -- ", " - ")
    if description.startswith(("Input", "__getitem__")) and profile.provenance.source != "imported":
        description = f"_{description}"  # those names have a meaning in the format
    sizes = [str(value.output_bytes) for value in layer.outputs]
    if not sizes and profile.provenance.source == "imported":
        sizes = [str(layer.saved_bytes)]
    activation = sizes[0] if len(sizes) == 1 else f"[{'; '.join(sizes)}]" if sizes else "0"
    return _line(node, description, layer.forward_s, layer.backward_s + layer.update_s, activation, layer.weight_bytes)


def _line(node: str, description: str, forward_s: float, backward_s: float, activation: str, weight_bytes: int) -> str:
    times = f"forward_compute_time={forward_s * 1e3!r}, backward_compute_time={backward_s * 1e3!r}"
    return f"{node} -- {description} -- {times}, activation_size={activation}, parameter_size={weight_bytes}"


def _parse(path: Path, lines: list[str]) -> tuple[dict[str, _Node], set[tuple[str, str]]]:
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.startswith("\t"):
            match line.strip().split(" -- "):
                case [source, target]:
                    edges[source, target] = number
                case _:
                    raise ProfileError(f"'{path}', line {number}: '{_short(line)}' is not an edge", hint=_HINT)
            continue
        node = _node(path, number, line)
        if node.name in nodes:
            raise ProfileError(f"'{path}', line {number}: {node.name} occurs twice", hint=_HINT)
        nodes[node.name] = node
    for (source, target), number in edges.items():
        for name in (source, target):
            if name not in nodes:
                raise ProfileError(f"'{path}', line {number}: the edge names the unknown node '{name}'", hint=_HINT)
    return nodes, set(edges)


def _node(path: Path, number: int, line: str) -> _Node:
    parts = line.strip().split(" -- ")
    if len(parts) not in (3, 4):  # the fourth is the stage that the optimizer chose
        raise ProfileError(f"'{path}', line {number}: '{_short(line)}' is not a node", hint=_HINT)
    fields = dict(part.split("=", 1) for part in parts[2].split(", ") if "=" in part)
    numbers = {}
    for name in _FIELDS:
        if name not in fields:
            raise ProfileError(f"'{path}', line {number}: {name} is missing", hint=_HINT)
        try:
            numbers[name] = sum(float(part) for part in fields[name].strip("[] ").split(";"))
        except ValueError:
            numbers[name] = math.nan
        if not (numbers[name] >= 0 and math.isfinite(numbers[name])):
            raise ProfileError(
                f"'{path}', line {number}: {name}={_short(fields[name])} is not a number from zero up", hint=_HINT
            )
    return _Node(parts[0], parts[1], numbers)


def _without_bookkeeping(
    nodes: dict[str, _Node], edges: set[tuple[str, str]]
) -> tuple[dict[str, _Node], set[tuple[str, str]]]:
    """Drop inputs and unused `__getitem__` nodes, in one pass as the published optimizer does."""
    targets, sources = {target for _, target in edges}, {source for source, _ in edges}
    unwanted = {
        name
        for name, node in nodes.items()
        if (name not in targets and node.description.startswith("Input"))
        or (name not in sources and node.description.startswith("__getitem__"))
    }
    kept = {name: node for name, node in nodes.items() if name not in unwanted}
    return kept, {edge for edge in edges if unwanted.isdisjoint(edge)}


def _execution_order(path: Path, nodes: Iterable[str], edges: set[tuple[str, str]]) -> list[str]:
    """Return the topological order that follows the numbers in the names: they count in the order of execution."""
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter({name: set() for name in nodes})
    for source, target in edges:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except graphlib.CycleError as cause:
        cycle = " -> ".join(cause.args[1])
        raise ProfileError(f"'{path}': the edges form a cycle, {cycle}", hint=_HINT) from None
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=_number)
        sorter.done(ready[0])
        order.append(ready.pop(0))
    return order


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"\d+", name)
    return (int(digits[0]) if digits else 0, name)


def _layer(node: _Node, used: bool) -> Layer:
    activation_bytes, weight_bytes = int(node.numbers["activation_size"]), int(node.numbers["parameter_size"])
    value = Value(name=node.name, output_bytes=activation_bytes, gradient_bytes=activation_bytes)
    return Layer(
        name=node.name,
        op=node.description.split("(", 1)[0],
        forward_s=node.numbers["forward_compute_time"] / 1e3,
        backward_s=node.numbers["backward_compute_time"] / 1e3,
        update_s=0.0,
        outputs=(value,) if used else (),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        saved_bytes=activation_bytes,
    )


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 60 else text[:57] + "..."
