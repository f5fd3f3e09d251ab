"""The report's file: self-contained, escaped, complete."""

from __future__ import annotations

import json
import re
import sys
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.analysis.compare import compare
from planner.errors import InputError
from planner.formats.cluster import hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.timeline import Events, Timeline
from planner.reporting.page.page import report_page, script_json
from planner.reporting.timeline import MOST_WORKERS, opening, shown_workers
from planner.reporting.trace import save_trace
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from planner.solver import search_plan as solve
from tests.samples import layer, profile
from tests.simulator.plans import equal_layers, plan_of

ROOT = Path(__file__).resolve().parents[3]
EVIL = ('</script><script>alert("1")</script>', '<img src="x">', "<!-- é & \u2028 𝛼 'quoted'")
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Elements(HTMLParser):
    """Start tags in order, and whether every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.open

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def evil_plan() -> Plan:
    """Whose model and layers have names to be careful with."""
    layers = [layer(name, output_bytes=10, saved_bytes=5, weight_bytes=100) for name in EVIL]
    plan = plan_of(
        layers, (1, 1, 1), hierarchical_cluster((3, 1), (100.0, 100.0), memory_bytes=10**6)
    )
    return plan.model_copy(update={"model": EVIL[0]})


def data_of(page: str) -> dict[str, Any]:
    """What the charts draw."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def slower(timeline: Timeline, factor: float) -> Timeline:
    """The same run, as if measured."""
    rows = [
        e._replace(start_s=e.start_s * factor, end_s=e.end_s * factor)
        for e in timeline.events.rows()
    ]
    return timeline.model_copy(
        update={"source": "measured", "events": Events.of(rows), "links": ()}
    )


def test_all_text_is_escaped_and_every_element_closed() -> None:
    plan = evil_plan()
    page = report_page(plan, simulate(plan, 6), why_not=EVIL[1])
    elements = Elements(page)
    assert sum(tag == "script" for tag, _ in elements.found) == 2
    assert not any(tag == "img" for tag, _ in elements.found)
    text = "".join(elements.texts)
    assert all(name in text for name in EVIL)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [attributes["href"] for tag, attributes in elements.found if tag == "a"]
    assert {f"#{name}" for name in ids} >= set(links)


def test_nothing_is_loaded() -> None:
    plan = evil_plan()
    page = report_page(plan, simulate(plan, 6))
    assert "default-src 'none'" in page
    for _, attributes in Elements(page).found:
        assert not (attributes.get("src") or "").startswith(("http", "//"))
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
    assert "@import" not in page
    assert not re.search(r"url\((?!data:)", page)


def test_json_in_a_script_ends_nothing() -> None:
    text = script_json({"name": EVIL})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"name": list(EVIL)}


def test_the_charts_have_every_event_and_curve() -> None:
    plan = evil_plan()
    timeline = simulate(plan, 6)
    data = data_of(report_page(plan, timeline))
    rows = [row for worker in data["workers"] for row in worker["rows"]]
    assert sum(len(row["step"]) for row in rows) == len(timeline.events)
    ends = [(sum(row["step"]) + row["length"][-1]) * data["tick_s"] for row in rows]
    assert max(ends) == pytest.approx(timeline.span_s)
    assert [strip["rank"] for strip in data["memory"]] == [0, 1, 2]
    assert data["memory"][0]["limit_bytes"] == 10**6
    assert data["span_s"] == timeline.span_s


def test_a_run_is_laid_over_the_simulation() -> None:
    plan = evil_plan()
    timeline = simulate(plan, 6)
    page = report_page(plan, timeline, slower(timeline, 1.25))
    data = data_of(page)
    assert {row["source"] for row in data["workers"][0]["rows"]} == {"simulated", "measured"}
    assert data["span_s"] == pytest.approx(1.25 * timeline.span_s)
    assert "Predicted and measured" in page
    assert "(-20.0%)" in page  # of each stage's times
    other = plan_of(equal_layers(2), (1, 1))
    with pytest.raises(
        InputError, match="the run is of another plan: its config '1-1-1' is not the plan's '1-1'"
    ):
        report_page(other, simulate(other, 6), timeline)


def test_a_run_that_lost_a_host_tells_what_happened_under_the_plan_that_it_ended_with(
    tmp_path: Path,
) -> None:
    cluster, costs = (
        planner.flat_cluster(3, 1e3),
        profile(*(layer(name, 1, 2, output_bytes=9) for name in "abcdef")),
    )
    plan = planner.solve(costs, cluster, schedule="1f1b-flush", microbatches=4, survive=1)
    (left,) = plan.smaller
    assert left.config != plan.config
    run = slower(simulate(left, 6), 1.1).model_copy(
        update={"restarts": (f"lost host {EVIL[1]}: training goes on",)}
    )
    save_trace(run, tmp_path / "run.json")
    page = planner.report(plan, tmp_path / "report.html", run=tmp_path / "run.json").read_text(
        encoding="utf-8"
    )
    Elements(page)
    assert f"{left.config} on 2 GPUs" in page
    assert "Before these minibatches the workers were started again:" in page
    assert "<li>lost host &lt;img src=&quot;x&quot;&gt;: training goes on</li>" in page


def test_with_the_profile_there_are_alternatives() -> None:
    model = profile(
        layer("a", 0.2, 0.4, output_bytes=1000), layer("b", 0.1, 0.2, weight_bytes=10**8)
    )
    plan = solve(model, hierarchical_cluster((2, 2), (1e9, 1e8)))
    page = report_page(plan, simulate(plan), comparison=compare(model, plan))
    Elements(page)
    assert "equal time" in page


def test_a_page_shows_some_of_very_many_workers() -> None:
    wide = plan_of(equal_layers(2), (70, 70))
    assert shown_workers(simulate(wide, 140)) == (0, 70)
    long = simulate(plan_of(equal_layers(100), (1,) * 100), 2)
    assert len(shown_workers(long)) <= MOST_WORKERS
    page = report_page(wide, simulate(wide, 140))
    assert "2 of 140 workers are shown" in page


def test_a_timeline_opens_on_six_steady_minibatches() -> None:
    plan = evil_plan()
    long = simulate(plan, 48)
    summary = summarize(long)
    start, end = opening(summary, long, long.span_s)
    assert end - start == pytest.approx(6 * summary.seconds_per_minibatch)
    assert summary.steady_from_s <= start < end <= summary.steady_to_s
    short = simulate(plan, 4)
    assert opening(summarize(short), short, short.span_s) == (0.0, short.span_s)


def test_what_was_measured_stands_first() -> None:
    plan = evil_plan()
    timeline = simulate(plan, 12)
    found = Elements(report_page(plan, timeline, slower(timeline, 1.25))).found
    sections = [attributes["id"] for tag, attributes in found if tag == "section"]
    assert sections[:2] == ["summary", "measured"]


def test_what_does_not_fit_is_said() -> None:
    plan = evil_plan()
    tight = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"memory_bytes": 1})})
    assert "Workers 0, 1, 2 would need more memory than there is." in report_page(
        tight, simulate(tight, 6)
    )
    assert "would need more" not in report_page(tight, simulate(plan, 6))


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="reads pyproject.toml with tomllib, which Python 3.10 lacks"
)
def test_the_parts_are_packaged() -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        patterns = content["tool"]["setuptools"]["package-data"]["planner.reporting.page"]
        parts = list((ROOT / "planner" / "reporting" / "page" / "html").iterdir())
        assert len(parts) >= 6
        assert all(
            any(fnmatch(f"html/{part.name}", pattern) for pattern in patterns) for part in parts
        )
