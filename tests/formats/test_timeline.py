"""Timelines: their rules, their names, their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from planner.errors import InputError
from planner.formats.timeline import Event, Events, load_timeline, save_timeline
from tests.timelines import EVENTS, by_hand


def test_events_come_back_by_their_start() -> None:
    events = Events.of(reversed(EVENTS))
    assert len(events) == len(EVENTS)
    assert [event.start_s for event in events.rows()] == sorted(event.start_s for event in EVENTS)
    assert set(events.rows()) == set(EVENTS)
    assert list(Events.of(()).rows()) == []


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    timeline = by_hand()
    save_timeline(timeline, tmp_path / "timeline.json")
    assert load_timeline(tmp_path / "timeline.json") == timeline


def test_a_file_of_version_0_2_loads(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(
        json.dumps({**json.loads(by_hand().model_dump_json()), "accumulate": 1})
    )
    assert load_timeline(tmp_path / "timeline.json") == by_hand()


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    content = json.loads(by_hand().model_dump_json())
    for change, complaint in (
        ({"events": {**content["events"], "end_s": [0.5]}}, "the lists differ in length"),
        (
            {"memory": [{"rank": 0, "time_s": [0.0], "held_bytes": []}]},
            "the lists differ in length",
        ),
        ({"links": [{**content["links"][0], "end_s": []}]}, "the lists differ in length"),
        ({"accumulate": 2}, "accumulate"),  # version 0.2 had an option for that
    ):
        (tmp_path / "timeline.json").write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=complaint):
            load_timeline(tmp_path / "timeline.json")


def test_names_are_those_of_the_drawn_schedules() -> None:
    timeline = by_hand()
    assert [timeline.name_of(event) for event in EVENTS[:6]] == ["F0", "A0", "A0", "F0", "B0", "U0"]
    divided = by_hand(microbatches=4)
    assert divided.name_of(Event(1, "forward", 1, 2, 3, 0.0, 1.0)) == "F2.3"
    assert divided.name_of(Event(1, "update", 1, 2, 0, 0.0, 1.0)) == "U2"
    chunked = timeline.model_copy(update={"ranks": ((0,), (1,), (0,), (1,))})
    assert chunked.name_of(Event(1, "backward", 3, 2, 0, 0.0, 1.0)) == "B2'"


def test_its_length_and_workers() -> None:
    timeline = by_hand()
    assert timeline.span_s == 6.875
    assert timeline.workers == (0, 1)
    with pytest.raises(ValidationError):
        timeline.model_validate({**timeline.model_dump(), "minibatches": None})
