"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import planner
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.timeline import Timeline
from planner.schedule.registry import SCHEDULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
VERBS = ("profile", "solve", "price", "show", "simulate", "report", "train", "export", "quickstart")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("record", [Profile, Plan, Timeline])
def test_every_field_has_a_row(hooks: ModuleType, record: type[Record]) -> None:
    text = hooks.field_tables(f"{record.__module__}.{record.__name__}")
    for name in record.model_fields:
        assert f"| `{name}` |" in text


def test_a_row_shows_bounds_default_and_the_comment_behind_the_field(hooks: ModuleType) -> None:
    text = hooks.field_tables("planner.formats.profile.Profile")
    bounds = "integer ≥ 1 and ≤ 2147483648 or null"
    assert (
        f"| `microbatch_size` | {bounds} | `null` | samples; null where the source does not say |"
        in text
    )
    assert "| `layers` | list of [Layer](#layer), at least 1 |  |  |" in text


def test_a_record_of_both_files_is_written_once_on_a_page(hooks: ModuleType) -> None:
    page = (DOCS / "reference" / "file-formats.md").read_text(encoding="utf-8")
    text = hooks.on_page_markdown(page)
    assert "<!-- fields" not in text
    assert text.count("### Device {") == 1


def test_the_command_line_page_has_the_help_of_every_verb(hooks: ModuleType) -> None:
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert all(f"<!-- help: plan {verb} -->" in page for verb in VERBS)
    text = hooks.on_page_markdown(page)
    assert all(f"usage: plan {verb}" in text for verb in VERBS)


def test_devices_become_a_table(hooks: ModuleType) -> None:
    table = hooks.on_page_markdown("<!-- devices: all -->")
    assert (
        "| `v100-pcie` | NVIDIA Tesla V100 PCIe 16 GB | 14 | 14 |  | 112 | 900 | 15.8 GiB |"
        in table
    )


def test_the_table_of_schedules_and_the_readme_name_them_all() -> None:
    table = (DOCS / "explanation" / "schedules.md").read_text(encoding="utf-8")
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    for schedule in SCHEDULES:
        assert f"| `{schedule}`" in table
        assert f"`{schedule}`" in readme
    # What equals one device is what the README's comparison says.
    equal = ", ".join(f"`{schedule}`" for schedule in SCHEDULES if not schedule.asynchronous)
    assert f"equal to one device with {equal} |" in readme


def test_every_public_name_is_described(hooks: ModuleType) -> None:
    page = hooks.on_page_markdown((DOCS / "reference" / "python.md").read_text(encoding="utf-8"))
    for name in planner.__all__:
        assert f"### planner.{name}\n" in page
    assert "- `cluster`: devices, memory and links.\n" in page  # of the arguments of `solve`
    assert " at 0x" not in page


def test_scripts_are_shown_as_they_are(hooks: ModuleType) -> None:
    shown = hooks.on_page_markdown("<!-- script: slurm.sbatch -->")
    assert (DOCS / "scripts" / "slurm.sbatch").read_text(encoding="utf-8").strip() in shown
