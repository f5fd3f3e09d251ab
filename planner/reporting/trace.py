"""Write timelines as Chrome traces, which Perfetto (ui.perfetto.dev) and chrome://tracing open, and
read them back.

Source: "Trace Event Format", Google (the JSON object format). A worker is a process; compute, send,
    receive and
all-reduce are its threads, several of each where slices overlap, as in real runs; memory is a
counter. Times are in microseconds.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from planner.errors import InputError
from planner.formats.files import first_problem, read_json, write_text
from planner.formats.timeline import Event, Events, Timeline, load_timeline
from planner.reporting.timeline import LANE_ORDER, side_by_side
from planner.simulator.excerpt import ROUNDS
from planner.simulator.summary import stages_of

MICROSECONDS = 1e6
_THREADS = 1000  # per lane, at most
_REMEDY = "make one with `trace`: plan simulate and plan train write it"

TraceEvent: TypeAlias = dict[str, Any]


def chrome_trace(timeline: Timeline) -> str:
    """Write the trace as JSON, with its events in the order of their times."""
    events = list(timeline.events.rows())
    rows = [*_slices(timeline, events), *_counters(timeline)]
    rows.sort(key=lambda row: row["ts"])
    head = {"timeline": timeline.model_dump(mode="json", exclude={"events"})}
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
    lines = ",\n".join(map(encode, (*_names(timeline, rows), *rows)))
    return f'{{"displayTimeUnit":"ms","otherData":{encode(head)},"traceEvents":[\n{lines}\n]}}\n'


def save_trace(timeline: Timeline, path: Path | str) -> None:
    """Write the trace to `path` atomically."""
    write_text(path, chrome_trace(timeline))


def load_run(path: Path | str) -> Timeline:
    """Read the timeline from a file that `save_trace` or `save_timeline` wrote; raise InputError
    for any other file.
    """
    path = Path(path)
    try:
        content = read_json(path)
    except (OSError, ValueError):
        content = None

    if not isinstance(content, dict) or "traceEvents" not in content:
        return load_timeline(path)  # its errors also cover files that are not JSON
    try:
        head = content["otherData"]["timeline"]
        events = Events.of(_event(row) for row in content["traceEvents"] if row["ph"] == "X")
        # validated here
        return Timeline.model_validate({**head, "events": events.model_dump(warnings=False)})
    except (KeyError, TypeError, AttributeError):  # whatever another program's rows lack
        raise InputError(
            f"'{path}' is a trace of another program: it has no timeline", hint=_REMEDY
        ) from None
    except ValidationError as cause:
        raise InputError(f"'{path}': {first_problem(cause)}", hint=_REMEDY) from None


def _slices(timeline: Timeline, events: Iterable[Event]) -> Iterator[TraceEvent]:
    """Yield a complete event for each event, on the first thread of its lane that is free
    by then.
    """
    lengths = {
        row[:2]: dict(zip(timeline.length_names, row[2:], strict=True)) for row in timeline.lengths
    }
    for event, row in side_by_side(events):
        start = _time(event.start_s)
        args: dict[str, Any] = {
            "stage": event.stage,
            "minibatch": event.minibatch,
            "microbatch": event.microbatch,
        }
        if event.peer_rank is not None:
            args |= {"peer_rank": event.peer_rank, "peer_stage": event.peer_stage or 0}
        if event.kind not in ROUNDS and (found := lengths.get((event.minibatch, event.microbatch))):
            args["lengths"] = found
        yield {
            "ph": "X",
            "pid": event.rank,
            "tid": LANE_ORDER.index(event.lane) * _THREADS + row,
            "ts": start,
            "dur": round(_time(event.end_s) - start, 3),
            "name": timeline.name_of(event),
            "cat": event.kind,
            "args": args,
        }


def _counters(timeline: Timeline) -> Iterator[TraceEvent]:
    for curve in timeline.memory:
        for time_s, held in zip(curve.time_s, curve.held_bytes, strict=True):
            row = {"ph": "C", "pid": curve.rank, "ts": _time(time_s), "name": "memory"}
            yield row | {"args": {"bytes": held}}


def _names(timeline: Timeline, rows: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the names of processes and threads, and their order."""
    for rank in timeline.workers:
        stages = stages_of(timeline, rank)
        name = f"worker {rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        worker = {"ph": "M", "pid": rank}
        yield {**worker, "name": "process_name", "args": {"name": name}}
        yield {**worker, "name": "process_sort_index", "args": {"sort_index": rank}}

    threads = {(row["pid"], row["tid"]) for row in rows if row["ph"] == "X"}
    for rank, number in sorted(threads):
        thread = {"ph": "M", "pid": rank, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": _thread_name(number)}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}


def _thread_name(number: int) -> str:
    """Return "send", or "send 2" for the second row of a lane."""
    lane = LANE_ORDER[number // _THREADS]
    row = number % _THREADS
    if row == 0:
        return lane
    return f"{lane} {row + 1}"


def _time(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 3)


def _event(row: TraceEvent) -> Event:
    # to the bit equal to the start of an event that follows at once
    end = round(row["ts"] + row["dur"], 3)
    times = {"start_s": row["ts"] / MICROSECONDS, "end_s": end / MICROSECONDS}
    args = {name: value for name, value in row["args"].items() if name in Event._fields}
    return Event(rank=row["pid"], kind=row["cat"], **times, **args)
