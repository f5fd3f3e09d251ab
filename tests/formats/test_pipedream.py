"""Reading the published profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import ProfileError
from planner.formats.importers import is_profile, read_profile
from planner.formats.pipedream import graph_txt, load_graph_txt
from planner.formats.profile import Edge, Profile, Value, load_profile, save_profile
from tests.samples import layer, profile

LINE = "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
GRAPH = "\n".join(
    [
        LINE.format("node3", "LSTM(4, 4)", "3.0", "4.0", "[6.0; 1.0; 1.0]", "7.0"),
        LINE.format("node1", "Input0", "17.0", "1.0", "9.0", "0.000"),
        LINE.format("node2", "Embedding(3, 4, padding_idx=0)", "1.5", "2.5", "5.0", "2.0"),
        LINE.format("node4", "__getitem__(0)", "0.0", "0.0", "6.0", "0.0") + " -- stage_id=1",
        LINE.format("node5", "__getitem__(1)", "0.0", "0.0", "1.0", "0.0"),
        LINE.format("node6", "Linear(in_features=4, out_features=2, bias=True)", "1.0", "1.0", "2.0", "3.0"),
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


def test_the_format_is_told_by_content(path: Path, tmp_path: Path) -> None:
    assert read_profile(path) == load_graph_txt(path)
    ours = profile(layer("a"))
    save_profile(ours, tmp_path / "misnamed.txt")
    assert read_profile(tmp_path / "misnamed.txt") == ours
    assert is_profile(path)
    assert is_profile(tmp_path / "misnamed.txt")
    assert not is_profile(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("forward_compute_time=1.5", "forward_compute_time=-1.5", "line 3: forward_compute_time=-1.5 is not a number"),
        ("forward_compute_time=1.5", "forward_compute_time=nan", "line 3: forward_compute_time=nan is not a number"),
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
        read_profile(path)
    assert complaint in caught.value.message


def _written(of: Profile, folder: Path) -> Profile:
    path = folder / "written.txt"
    path.write_text(graph_txt(of), encoding="utf-8")
    return load_graph_txt(path)


def _assert_alike(one: Profile, other: Profile) -> None:
    assert len(one.layers) == len(other.layers)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert (mine.name, mine.op, mine.weight_bytes, mine.saved_bytes) == (
            *(theirs.name, theirs.op, theirs.weight_bytes, theirs.saved_bytes),
        )
        assert mine.outputs == theirs.outputs
        assert mine.forward_s == pytest.approx(theirs.forward_s, rel=1e-12)
        assert mine.backward_s == pytest.approx(theirs.backward_s, rel=1e-12)
    assert one.edges == other.edges


def test_an_imported_profile_is_written_as_it_was_read(path: Path, tmp_path: Path) -> None:
    read = load_graph_txt(path)
    _assert_alike(_written(read, tmp_path), read)


ANCHORS = Path(__file__).parents[3] / "shared" / "anchors" / "pipedream"


@pytest.mark.parametrize("name", ["alexnet", "gnmt", "inception_v3", "resnet50", "vgg16"])
def test_published_profiles_survive_the_round_trip(name: str, tmp_path: Path) -> None:
    if not ANCHORS.is_dir():
        pytest.skip(f"needs the published profiles in {ANCHORS}")
    read = load_graph_txt(ANCHORS / f"{name}.txt")
    _assert_alike(_written(read, tmp_path), read)


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gpt2", "lstm_lm"])
def test_our_own_profiles_as_graph_txt(name: str, tmp_path: Path) -> None:
    """Updates count as backward; each value of a layer with several can be told apart."""
    own = load_profile(Path(__file__).parents[2] / "profiles" / name / "cpu.json")
    read = _written(own, tmp_path)
    named = [one for one in read.layers if one.op != "__getitem__"]
    assert [one.op for one in named] == [one.op for one in own.layers]
    for mine, theirs in zip(named, own.layers, strict=True):
        assert mine.forward_s == pytest.approx(theirs.forward_s)
        assert mine.backward_s == pytest.approx(theirs.backward_s + theirs.update_s)
        assert mine.weight_bytes == theirs.weight_bytes
        assert sum(v.output_bytes for v in mine.outputs) == sum(v.output_bytes for v in theirs.outputs)


def test_values_that_go_different_ways_get_nodes_of_their_own(tmp_path: Path) -> None:
    first = layer("first").model_copy(
        update={"outputs": tuple(Value(name=n, output_bytes=b, gradient_bytes=b) for n, b in (("x", 5), ("y", 7)))}
    )
    own = profile(first, layer("InputNorm"), layer("last"), edges=[]).model_copy(
        update={
            "edges": (
                Edge(source="first", value="x", target="InputNorm"),
                Edge(source="first", value="y", target="last"),
            )
        }
    )
    read = _written(own, tmp_path)
    assert [(one.name, one.op) for one in read.layers][:3] == [
        ("node1", own.layers[0].op),
        ("node1_0", "__getitem__"),
        ("node1_1", "__getitem__"),
    ]
    assert [v.output_bytes for one in read.layers[:3] for v in one.outputs] == [12, 5, 7]
    assert {(edge.source, edge.target) for edge in read.edges} == {
        *(("node1", "node1_0"), ("node1", "node1_1"), ("node1_0", "node2"), ("node1_1", "node3")),
    }
