"""Read profiles in the format of those that PipeDream published, graph.txt.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.19, backward_compute_time=5.348,
    activation_size=[6.0; 1.0], ... <TAB>node6 -- node7

Times are in milliseconds, sizes in bytes; a list of sizes means their sum. Sources whose
description starts with "Input" are data, which every stage reads by itself, and unused
`__getitem__` nodes are bookkeeping: both are left out, as in the published optimizer. Such a
profile is enough for planning but not for training.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import ProfileError
from planner.formats.profile import REMEDY, Device, Edge, Layer, Profile, Provenance, Value
from planner.version import __version__

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_HINT = (
    "a line is 'node1 -- Conv2d(...) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=3.0, parameter_size=4.0', or an edge: a tab and 'node1 -- node2'"
)


def load_graph_txt(path: Path) -> Profile:
    """Read a published profile; raise ProfileError naming the file and the line."""
    import networkx  # takes longer than most commands

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ProfileError(f"'{path}' cannot be read: {cause}", hint=REMEDY) from None
    graph: Any = networkx.DiGraph()
    try:
        for number, line in enumerate(lines, 1):
            _add(graph, number, line)
        for *ends, number in graph.edges(data="line"):
            for name in ends:
                if "description" not in graph.nodes[name]:
                    raise ValueError(f"line {number}: the edge names the unknown node '{name}'")
    except ValueError as cause:
        raise ProfileError(f"'{path}', {cause}", hint=_HINT) from None
    unwanted = [
        name
        for name, node in graph.nodes.items()
        if (node["description"].startswith("Input") and not graph.pred[name])
        or (node["description"].startswith("__getitem__") and not graph.succ[name])
    ]
    graph.remove_nodes_from(unwanted)
    if not graph:
        raise ProfileError(f"'{path}', it holds no layers", hint=_HINT)
    try:
        # The numbers in the names count in the order of execution.
        order = list(networkx.lexicographical_topological_sort(graph, key=_number))
    except networkx.NetworkXUnfeasible:
        cycle = " -> ".join(source for source, _ in networkx.find_cycle(graph))
        raise ProfileError(f"'{path}': the edges form a cycle, {cycle}", hint=_HINT) from None
    position = {name: index for index, name in enumerate(order)}
    return Profile(
        model=path.stem,
        device=Device(kind="unknown", name="unknown"),
        layers=tuple(
            _layer(name, graph.nodes[name], used=bool(graph.succ[name])) for name in order
        ),
        edges=tuple(
            Edge(source=source, value=source, target=target)
            for source, target in sorted(
                graph.edges, key=lambda edge: (position[edge[0]], position[edge[1]])
            )
        ),
        provenance=Provenance(tool=f"planner {__version__}, from '{path.name}'", source="imported"),
    )


def _add(graph: Any, number: int, line: str) -> None:
    parts, shown = line.strip().split(" -- "), line.strip()[:60]
    if line.startswith("\t") and len(parts) == 2:
        graph.add_edge(*parts, line=number)
    # the fourth is the stage that the optimizer chose
    elif not line.startswith("\t") and len(parts) in (3, 4):
        if graph.nodes.get(parts[0]):
            raise ValueError(f"line {number}: {parts[0]} occurs twice")
        graph.add_node(parts[0], description=parts[1], **_numbers(number, parts[2]))
    elif line.strip():
        raise ValueError(f"line {number}: '{shown}' is neither a node nor an edge")


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
            raise ValueError(
                f"line {line}: {name}={fields[name][:60]} is not a number from zero up"
            )
    return numbers


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"\d+", name)
    return (int(digits[0]) if digits else 0, name)


def _layer(name: str, numbers: Mapping[str, Any], *, used: bool) -> Layer:
    activation_bytes, weight_bytes = int(numbers["activation_size"]), int(numbers["parameter_size"])
    value = Value(name=name, output_bytes=activation_bytes, gradient_bytes=activation_bytes)
    return Layer(
        name=name,
        op=numbers["description"].split("(", 1)[0],
        forward_s=numbers["forward_compute_time"] / 1e3,
        backward_s=numbers["backward_compute_time"] / 1e3,
        update_s=0.0,
        outputs=(value,) if used else (),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        saved_bytes=activation_bytes,
    )
