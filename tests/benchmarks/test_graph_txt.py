"""Reading the published profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.graph_txt import load_graph_txt
from planner.errors import ProfileError

LINE = (
    "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, "
    "parameter_size={}"
)
GRAPH = "\n".join(
    [
        LINE.format("node3", "LSTM(4, 4)", "3.0", "4.0", "[6.0; 1.0; 1.0]", "7.0"),
        LINE.format("node1", "Input0", "17.0", "1.0", "9.0", "0.000"),
        LINE.format("node2", "Embedding(3, 4, padding_idx=0)", "1.5", "2.5", "5.0", "2.0"),
        LINE.format("node4", "__getitem__(0)", "0.0", "0.0", "6.0", "0.0") + " -- stage_id=1",
        LINE.format("node5", "__getitem__(1)", "0.0", "0.0", "1.0", "0.0"),
        LINE.format(
            "node6", "Linear(in_features=4, out_features=2, bias=True)", "1.0", "1.0", "2.0", "3.0"
        ),
        "\tnode3 -- node4",
        "\tnode3 -- node5",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode4 -- node6",
        "\tnode2 -- node6",
    ]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.txt"
    path.write_text(GRAPH)
    return path


def test_nodes_become_layers_in_execution_order_without_bookkeeping(path: Path) -> None:
    read = load_graph_txt(path)
    assert [layer.name for layer in read.layers] == ["node2", "node3", "node4", "node6"]
    assert [layer.op for layer in read.layers] == ["Embedding", "LSTM", "__getitem__", "Linear"]
    lstm = read.layers[1]
    assert (lstm.forward_s, lstm.backward_s) == (0.003, 0.004)
    assert lstm.outputs[0].output_bytes == lstm.saved_bytes == 8  # the parts sum
    assert lstm.weight_bytes == lstm.gradient_bytes == 7
    assert {(edge.source, edge.target) for edge in read.edges} == {
        ("node2", "node3"),
        ("node3", "node4"),
        ("node4", "node6"),
        ("node2", "node6"),
    }
    assert read.provenance.source == "imported"
    assert read.graph_hash is None
    assert read.microbatch_size is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "forward_compute_time=1.5",
            "forward_compute_time=-1.5",
            "line 3: forward_compute_time=-1.5 is not a number",
        ),
        (
            "forward_compute_time=1.5",
            "forward_compute_time=nan",
            "line 3: forward_compute_time=nan is not a number",
        ),
        ("[6.0; 1.0; 1.0]", "[6.0; x]", "line 1: activation_size=[6.0; x] is not a number"),
        ("forward_compute_time=1.5", "time=1.5", "line 3: forward_compute_time is missing"),
        ("\tnode1 -- node2", "\tnode1 -- node9", "line 9: the edge names the unknown node 'node9'"),
        ("\tnode1 -- node2", "\tnode1", "line 9: 'node1' is neither a node nor an edge"),
        ("\tnode1 -- node2", "\tnode6 -- node2", "the edges form a cycle"),
        ("node6 -- Lin", "node2 -- Lin", "line 6: node2 occurs twice"),
        ("node6 -- Lin", "Lin", "is neither a node nor an edge"),
    ],
)
def test_a_bad_line_is_named(path: Path, old: str, new: str, complaint: str) -> None:
    path.write_text(GRAPH.replace(old, new, 1))
    with pytest.raises(ProfileError) as caught:
        load_graph_txt(path)
    assert complaint in caught.value.message
