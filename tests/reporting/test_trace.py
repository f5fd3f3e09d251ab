"""Traces against the rules of the format, and back."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner.errors import InputError
from planner.formats.timeline import Event, Events, Timeline, save_timeline
from planner.reporting.trace import chrome_trace, load_run, save_trace
from tests.timelines import EVENTS, by_hand


def check_trace(text: str) -> list[dict[str, Any]]:
    """The events of a trace that keeps the rules of the format."""
    content = json.loads(text)
    rows: list[dict[str, Any]] = content["traceEvents"]
    timed = [row for row in rows if row["ph"] != "M"]
    assert all(earlier["ts"] <= later["ts"] for earlier, later in pairwise(timed))
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        assert row["ph"] in "XMC"
        assert isinstance(row["pid"], int)
        if row["ph"] == "X":
            assert row["dur"] >= 0
            threads[row["pid"], row["tid"]].append(row)
    for slices in threads.values():  # beside each other
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
    named = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    assert named == set(threads)
    assert {row["pid"] for row in rows if row["name"] == "process_name"} >= {
        pid for pid, _ in threads
    }
    return rows


def test_the_trace_of_two_workers() -> None:
    rows = check_trace(chrome_trace(by_hand()))
    slices = [row for row in rows if row["ph"] == "X"]
    assert len(slices) == len(EVENTS)
    first = slices[0]
    assert (first["name"], first["ts"], first["dur"]) == ("F0", 0.0, 1e6)
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names == ["worker 0: stage 0", "worker 1: stage 1"]
    lanes = {
        row["args"]["name"] for row in rows if row["name"] == "thread_name" and row["pid"] == 0
    }
    assert lanes == {"compute", "send", "receive"}
    assert [row["args"]["bytes"] for row in rows if row["ph"] == "C"] == [300, 100]


def test_what_follows_at_once_still_does_when_it_is_read_back(tmp_path: Path) -> None:
    """Else the run's timeline has it in a row below."""
    ends = [0.1 * n / 3 for n in range(200)]
    events = [
        Event(0, "forward", 0, minibatch, 0, start, end)
        for minibatch, (start, end) in enumerate(pairwise(ends))
    ]
    timeline = by_hand().model_copy(
        update={"events": Events.of(events), "minibatches": len(events)}
    )
    save_trace(timeline, tmp_path / "trace.json")
    read = load_run(tmp_path / "trace.json")
    assert all(one.end_s == other.start_s for one, other in pairwise(read.events.rows()))


def test_slices_that_overlap_go_to_threads_of_their_own() -> None:
    more = (
        Event(0, "send_activation", 0, 0, 1, 1.25, 2.0, 1, 1),
        Event(0, "send_activation", 0, 0, 2, 1.75, 2.5, 1, 1),
    )
    rows = check_trace(chrome_trace(by_hand(*more, microbatches=3)))
    threads = [
        row["args"]["name"] for row in rows if row["name"] == "thread_name" and row["pid"] == 0
    ]
    assert threads == ["compute", "send", "send 2", "receive"]
    assert [row["name"] for row in rows if row["ph"] == "X" and row["tid"] == 1001] == ["A0.1"]


def test_it_reads_back_as_the_timeline_that_it_was(tmp_path: Path) -> None:
    timeline = by_hand()
    save_trace(timeline, tmp_path / "trace.json")
    assert load_run(tmp_path / "trace.json") == timeline
    save_timeline(timeline, tmp_path / "timeline.json")
    assert load_run(tmp_path / "timeline.json") == timeline


def test_events_have_the_lengths_of_their_microbatches(tmp_path: Path) -> None:
    """Of two microbatches per minibatch; updates have none, nor do microbatches of which none are
    known.
    """
    lengths = ((3, 0, 12, 14), (3, 1, 7, 5), (4, 0, 9, 9))
    more = [
        Event(0, "forward", 0, 3 + number // 2, number % 2, 10 + number, 11 + number)
        for number in range(4)
    ]
    changes = {"length_names": ("source", "target"), "lengths": lengths}
    timeline = by_hand(*more, microbatches=2).model_copy(update=changes)
    save_trace(timeline, tmp_path / "trace.json")
    assert load_run(tmp_path / "trace.json") == timeline
    rows = check_trace(chrome_trace(timeline))
    late = [row["args"] for row in rows if row["ph"] == "X" and row["args"]["minibatch"] >= 3]
    found = [
        {"source": 12, "target": 14},
        {"source": 7, "target": 5},
        {"source": 9, "target": 9},
        None,
    ]
    assert [args.get("lengths") for args in late] == found
    assert not [row for row in rows if row.get("cat") == "update" and "lengths" in row["args"]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no file"),
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"traceEvents": []}', "it has no timeline"),
        ('{"traceEvents": [{"ph": "X"}], "otherData": {"timeline": {}}}', "it has no timeline"),
        (
            '{"traceEvents": [], "otherData": {"timeline": {"source": "dreamt"}}}',
            "source = 'dreamt'",
        ),
        ('{"traceEvents": [], "otherData": {"timeline": []}}', "is"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=complaint):
        load_run(path)


@pytest.mark.parametrize("field", ["minibatch", "stage"])
def test_an_event_with_a_word_for_a_number_is_one_sentence(tmp_path: Path, field: str) -> None:
    content = json.loads(chrome_trace(by_hand()))
    next(row for row in content["traceEvents"] if row["ph"] == "X")["args"][field] = "word"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    # warnings are errors here
    with pytest.raises(InputError, match=rf"events\.{field}\[\d+\] = 'word'"):
        load_run(path)


def test_a_run_of_nothing_is_a_trace_too() -> None:
    empty = Timeline.model_validate(
        {**by_hand().model_dump(), "events": {name: [] for name in Event._fields}}
    )
    assert check_trace(chrome_trace(empty.model_copy(update={"memory": ()})))
