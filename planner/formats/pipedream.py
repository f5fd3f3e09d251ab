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
from pathlib import Path

from planner.errors import ProfileError
from planner.formats.profile import REMEDY, Device, Edge, Layer, Profile, Provenance, Value
from planner.version import __version__

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_HINT = "a line is 'node1 -- Conv2d(...) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=3.0, \
parameter_size=4.0', or an edge: a tab and 'node1 -- node2'"


_Nodes = dict[str, tuple[str, dict[str, float]]]  # description and numbers, by name
_Edges = set[tuple[str, str]]


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
    try:
        nodes, edges = _without_bookkeeping(*_parse(lines))
        if not nodes:
            raise ValueError("it holds no layers")
        order = _execution_order(nodes, edges)
    except graphlib.CycleError as cause:
        raise ProfileError(f"'{path}': the edges form a cycle, {' -> '.join(cause.args[1])}", hint=_HINT) from None
    except ValueError as cause:
        raise ProfileError(f"'{path}', {cause}", hint=_HINT) from None
    used = {source for source, _ in edges}
    position = {name: index for index, name in enumerate(order)}
    return Profile(
        model=path.stem,
        device=Device(kind="unknown", name="unknown"),
        layers=tuple(_layer(name, *nodes[name], name in used) for name in order),
        edges=tuple(
            Edge(source=source, value=source, target=target)
            for source, target in sorted(edges, key=lambda edge: (position[edge[0]], position[edge[1]]))
        ),
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


def _parse(lines: Iterable[str]) -> tuple[_Nodes, _Edges]:
    nodes: _Nodes = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, 1):
        parts = line.strip().split(" -- ")
        shown = line.strip() if len(line.strip()) <= 60 else line.strip()[:57] + "..."
        if line.startswith("\t") and len(parts) == 2:
            edges[parts[0], parts[1]] = number
        elif line.startswith("\t") and line.strip():
            raise ValueError(f"line {number}: '{shown}' is not an edge")
        elif len(parts) in (3, 4):  # the fourth is the stage that the optimizer chose
            if parts[0] in nodes:
                raise ValueError(f"line {number}: {parts[0]} occurs twice")
            nodes[parts[0]] = parts[1], _numbers(number, parts[2])
        elif line.strip():
            raise ValueError(f"line {number}: '{shown}' is not a node")
    for edge, number in edges.items():
        for name in edge:
            if name not in nodes:
                raise ValueError(f"line {number}: the edge names the unknown node '{name}'")
    return nodes, set(edges)


def _numbers(line: int, text: str) -> dict[str, float]:
    fields = dict(part.split("=", 1) for part in text.split(", ") if "=" in part)
    numbers = {}
    for name in _FIELDS:
        if name not in fields:
            raise ValueError(f"line {line}: {name} is missing")
        try:
            numbers[name] = sum(float(part) for part in fields[name].strip("[] ").split(";"))
        except ValueError:
            numbers[name] = math.nan
        if not 0 <= numbers[name] < math.inf:
            raise ValueError(f"line {line}: {name}={fields[name][:60]} is not a number from zero up")
    return numbers


def _without_bookkeeping(nodes: _Nodes, edges: _Edges) -> tuple[_Nodes, _Edges]:
    """Drop inputs and unused `__getitem__` nodes, in one pass as the published optimizer does."""
    targets, sources = {target for _, target in edges}, {source for source, _ in edges}
    unwanted = {
        name
        for name, (description, _) in nodes.items()
        if (name not in targets and description.startswith("Input"))
        or (name not in sources and description.startswith("__getitem__"))
    }
    kept = {name: node for name, node in nodes.items() if name not in unwanted}
    return kept, {edge for edge in edges if unwanted.isdisjoint(edge)}


def _execution_order(nodes: Iterable[str], edges: _Edges) -> list[str]:
    """Return the topological order that follows the numbers in the names: they count in the order of execution."""

    def number(name: str) -> tuple[int, str]:
        digits = re.search(r"\d+", name)
        return (int(digits[0]) if digits else 0, name)

    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter({name: set() for name in nodes})
    for source, target in edges:
        sorter.add(target, source)
    sorter.prepare()
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=number)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return order


def _layer(name: str, description: str, numbers: Mapping[str, float], used: bool) -> Layer:
    activation_bytes, weight_bytes = int(numbers["activation_size"]), int(numbers["parameter_size"])
    value = Value(name=name, output_bytes=activation_bytes, gradient_bytes=activation_bytes)
    return Layer(
        name=name,
        op=description.split("(", 1)[0],
        forward_s=numbers["forward_compute_time"] / 1e3,
        backward_s=numbers["backward_compute_time"] / 1e3,
        update_s=0.0,
        outputs=(value,) if used else (),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        saved_bytes=activation_bytes,
    )
