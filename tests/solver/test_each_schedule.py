"""Schedules side by side: rows of one global batch, and what has no plan."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import planner
from planner.cli.main import main
from planner.errors import InputError
from planner.formats.profile import Profile
from tests.samples import layer, profile


@pytest.fixture
def sample() -> Profile:
    return profile(*(layer(f"l{n}", output_bytes=10, weight_bytes=10) for n in range(6)))


def test_rows_have_the_plans_of_solve(sample: Profile) -> None:
    cluster = planner.flat_cluster(2, 1e9)
    schedules = ["gpipe", "1f1b-flush", "1f1b"]
    rows = planner.compare_schedules(sample, cluster, schedules=schedules, microbatches=[4, 8]).rows

    assert [(str(row.schedule), row.microbatches) for row in rows] == [
        ("1f1b", 1),
        ("gpipe", 4),
        ("1f1b-flush", 4),
        ("gpipe", 8),
        ("1f1b-flush", 8),
    ]
    for row in rows:
        microbatches = row.microbatches if row.schedule.divides else None
        plan = planner.solve(sample, cluster, schedule=row.schedule.name, microbatches=microbatches)
        assert row.config == plan.config
        assert row.seconds_per_microbatch == pytest.approx(
            plan.predicted.seconds_per_minibatch / plan.microbatches
        )
        assert row.staleness == plan.staleness


def test_speed_ups_are_at_equal_global_batch(sample: Profile) -> None:
    small = sample.model_copy(update={"microbatch_size": 2})
    cluster = planner.flat_cluster(2, 1e9)
    rows = planner.compare_schedules(
        [sample, small], cluster, schedules=["gpipe", "1f1b-flush"], microbatches=[4, 8]
    ).rows
    batches = [row.global_batch for row in rows]
    assert batches == [8, 8, 16, 16, 16, 16, 32, 32]
    for batch in set(batches):
        same = [row for row in rows if row.global_batch == batch]
        assert same[0].speedup == 1
        for row in same:
            assert row.samples_per_s is not None
            assert same[0].samples_per_s is not None
            ratio = row.samples_per_s / same[0].samples_per_s
            assert row.speedup == pytest.approx(ratio)


def test_what_has_no_plan_says_why(sample: Profile) -> None:
    tiny = planner.flat_cluster(2, 1e9, memory_bytes=15)
    answer = planner.compare_schedules(sample, tiny, schedules=["gpipe"], microbatches=[4])
    (row,) = answer.rows
    assert row.config is None
    assert row.obstacle
    assert f"no plan under gpipe, 4 microbatches: {row.obstacle}" in str(answer)


def test_as_a_file_and_as_a_frame(
    sample: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = planner.flat_cluster(2, 1e9)
    answer = planner.compare_schedules(sample, cluster, schedules=["gpipe"], microbatches=[4])
    text = answer.to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text(encoding="utf-8") == text
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["schedule"] == "gpipe"
    assert row["config"] == answer.rows[0].config
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="needs pandas"):
        answer.to_frame()


def test_as_a_picture(sample: Profile) -> None:
    """A curve for each schedule that has a plan, through a dot for each global batch."""
    schedules = ["gpipe", "1f1b-flush"]
    answer = planner.compare_schedules(
        sample, planner.flat_cluster(2, 1e9), schedules=schedules, microbatches=[2, 4, 8]
    )
    drawn = ElementTree.fromstring(answer.plot().svg)
    curves = [each for each in drawn if each.tag.endswith("polyline")]
    assert [len(each.attrib["points"].split()) for each in curves] == [3, 3]
    texts = [each.text for each in drawn if each.tag.endswith("text")]
    assert {*schedules, "global batch, samples"} <= set(texts)

    tiny = planner.flat_cluster(2, 1e9, memory_bytes=15)
    none = planner.compare_schedules(sample, tiny, schedules=["gpipe"], microbatches=[4])
    with pytest.raises(InputError, match="no schedule has a plan"):
        none.plot()


def test_on_the_command_line(
    sample: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    planner.save_profile(sample, "profile.json")
    planner.solve(sample, planner.flat_cluster(2, 1e9), schedule="gpipe", microbatches=4).save()
    asked = ["compare", "--schedules", "gpipe,zb-h1", "--microbatches", "4", "--csv", "s.csv"]
    asked += ["--plot", "s.svg"]
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["schedule"] for row in rows] == ["gpipe", "zb-h1"]
    assert (tmp_path / "s.csv").read_text(encoding="utf-8").count("\n") == 3
    assert ElementTree.parse(tmp_path / "s.svg").getroot().tag.endswith("svg")


def test_a_plan_answers_by_itself(
    sample: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planner.solve(sample, planner.flat_cluster(2, 1e9), schedule="gpipe", microbatches=4)
    planner.save_profile(sample, "profile.json")
    assert plan.compare().rows == planner.compare(sample, plan).rows
    assert plan.compare(sample).rows == planner.compare(sample, plan).rows
    assert plan.report("r.html") == Path("r.html")
    timeline = plan.timeline(minibatches=2)
    assert timeline == planner.simulate(plan, 2)
    picture = timeline.plot()
    assert picture._repr_svg_().startswith("<svg")
    picture.save("t.svg")
    assert Path("t.svg").read_text(encoding="utf-8") == picture.svg


class _Axes:
    """Takes what matplotlib's take."""

    def __init__(self) -> None:
        self.bars: list[tuple[float, float]] = []
        self.names: list[str] = []

    def broken_barh(self, bars: list[tuple[float, float]], *_: object, **__: object) -> None:
        self.bars += bars

    def set_yticks(self, ticks: list[int], names: list[str]) -> None:
        self.names = names

    def invert_yaxis(self) -> None:
        pass

    def set_xlabel(self, text: str) -> None:
        assert text == "seconds"


def test_a_timeline_draws_into_axes(sample: Profile) -> None:
    plan = planner.solve(sample, planner.flat_cluster(2, 1e9), schedule="gpipe", microbatches=4)
    timeline = plan.timeline(minibatches=2)
    axes = _Axes()
    assert timeline.plot(axes=axes) is axes
    assert len(axes.bars) == len(timeline.events)
    assert axes.names == [f"worker {rank}" for rank in timeline.workers]
