"""What is written from the code into the pages is current, and says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from docs import write_pages
from docs.axes import axis_table
from planner.cli.main import GROUPS
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.timeline import Timeline
from planner.schedule.registry import SCHEDULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]


def test_the_pages_are_current() -> None:
    stale = [path.name for path, _ in write_pages.stale_pages()]
    assert stale == [], "run: python -m docs.write_pages"


def test_a_page_that_is_not_current_is_found_and_mended() -> None:
    page = "Text.\n\n<!-- devices: all -->\n\nold\n\n<!-- end -->\n\nMore.\n"
    made = write_pages.written(page)
    assert "old" not in made
    assert made.startswith("Text.\n\n<!-- devices: all -->\n\n| name |")
    assert made.endswith("|\n\n<!-- end -->\n\nMore.\n")
    assert write_pages.written(made) == made


@pytest.mark.parametrize("record", [Profile, Plan, Timeline])
def test_every_field_has_a_row(record: type[Record]) -> None:
    text = write_pages.field_tables(f"{record.__module__}.{record.__name__}")
    for name in record.model_fields:
        assert f"| `{name}` |" in text


def test_a_row_shows_bounds_default_and_the_comment_behind_the_field() -> None:
    text = write_pages.field_tables("planner.formats.profile.Profile")
    bounds = "integer ≥ 1 and ≤ 2147483648 or null"
    assert (
        f"| `microbatch_size` | {bounds} | `null` | samples; null where the source does not say |"
        in text
    )
    assert "| `layers` | list of [Layer](#layer), at least 1 |  |  |" in text


def test_a_record_of_several_files_is_written_once_on_a_page() -> None:
    page = (DOCS / "reference" / "file-formats.md").read_text(encoding="utf-8")
    assert page.count("### Device {") == 1


def test_the_command_line_page_has_all_verbs_and_their_options() -> None:
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"[`plan {verb}`](#plan-{verb})" in page
        assert f"<!-- options: plan {verb} -->" in page


def test_options_say_their_values_and_defaults_and_those_of_a_first_week_come_first() -> None:
    usual, others = write_pages.option_tables("plan solve").split("Shown by `--help-all`:")
    assert "| `--microbatches M` |" in usual
    assert "| `-o`, `--output FILE` | file to write (default: plan.json) |" in usual
    assert "| `--minibatch`, `--global-batch-size SIZE` |" in usual
    assert "| `--max-stages N` |" in others


def test_texts_in_tables_are_no_markdown() -> None:
    table = write_pages.option_tables("plan profile")
    assert r"model.py:builder for another function than build\_model" in table


def test_devices_become_a_table() -> None:
    assert (
        "| `v100-pcie` | NVIDIA Tesla V100 PCIe 16 GB | 14 | 14 |  | 112 | 900 | 15.8 GiB |"
        in write_pages.device_table()
    )


def test_the_table_of_schedules_names_them_all() -> None:
    table = (DOCS / "explanation" / "schedules.md").read_text(encoding="utf-8")
    for schedule in SCHEDULES:
        assert f"| `{schedule}`" in table


def test_the_table_of_axes_has_a_row_for_every_schedule_and_file_of_stage_options() -> None:
    table = axis_table()
    rows = [line.split(" | ") for line in table.splitlines()]
    assert {len(row) for row in rows} == {6}
    for schedule in SCHEDULES:
        assert f"| `{schedule}` |" in table
    for word in ("replicas", "tensor parallelism", "ZeRO-1", "recomputation"):
        assert f"| {word}" in table


def test_every_public_name_is_described() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    for name in planner.__all__:
        assert f"### planner.{name}\n" in page
    assert "- `cluster`: devices, memory and links.\n" in page  # of the arguments of `solve`
    assert " at 0x" not in page


def test_scripts_are_shown_as_they_are() -> None:
    shown = write_pages.script("slurm.sbatch")
    assert (DOCS / "scripts" / "slurm.sbatch").read_text(encoding="utf-8").strip() in shown
