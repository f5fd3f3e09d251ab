"""Pages are easy to edit and to review, and name only what exists."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.package_page import PAGE

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").rglob("*.md")} - {PAGE}),  # PAGE is README.md once more
    *sorted((ROOT / "benchmarks").rglob("README.md")),
)
LONGEST_LINE = 100
_WRITTEN = re.compile(
    r"<!-- (?:"
    r"(\w+): written by .*?<!-- end of \1 -->"  # by a benchmark
    r"|\w+: [^\n]+ -->\n.*?<!-- end -->"  # by docs.write_pages
    r"|result -->.*\Z)",
    re.DOTALL,
)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_TABLE_OR_CODE = re.compile(r"\s*\||    ")
# A link or a code span has no place for a line break.
_ONE_PIECE = re.compile(r"\s*(?:[-*] )?(?:!?\[[^\]]*\]\([^)]*\)|`[^`]*`)\S*")
_MODULE = re.compile(r"\b(?:planner|benchmarks)(?:\.(?!md\b)[A-Za-z_]\w*)+")
_LINK = re.compile(r"(?<!`)\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# In capitals stand names that the reader fills in; `*` is any name.
_FILE = re.compile(r"\b(?:planner|benchmarks|profiles|docs|tests)/[a-z0-9_/.*-]*[a-z0-9_*]")
_FORGE = "../../actions/"  # the state of the repository's workflows, wherever it is

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines by their number, without code, tables and what benchmarks write into the page."""
    for block in (_WRITTEN, _FENCED):
        text = block.sub(lambda found: "\n" * found[0].count("\n"), text)
    return (
        (number, line)
        for number, line in enumerate(text.split("\n"), 1)
        if not _TABLE_OR_CODE.match(line)
    )


@pages
def test_lines_are_short(page: Path) -> None:
    lines = prose(page.read_text(encoding="utf-8"))
    assert [
        n for n, line in lines if len(line) > LONGEST_LINE and not _ONE_PIECE.fullmatch(line)
    ] == []


def test_prose_leaves_out_tables_code_and_what_is_written_into_a_page() -> None:
    written = "<!-- x: written by benchmarks.x -->\nf\n<!-- end of x -->\ng\n<!-- result -->\nh"
    text = f"a\n| b |\n\n    c\n\n```text\nd\n```\ne\n{written}"
    assert [pair for pair in prose(text) if pair[1]] == [(1, "a"), (9, "e"), (13, "g")]


@pages
def test_modules_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {name for name in _MODULE.findall(text) if not exists(name)}
    missing |= {name for name in _FILE.findall(text) if not any(ROOT.glob(name))}
    assert missing == set()


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Those to other sites are not followed: CI has no network to rely on."""
    links = _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    inside = [link for link in links if "://" not in link and not link.startswith(_FORGE)]
    assert [link for link in inside if not leads(page, link)] == []


def leads(page: Path, link: str) -> bool:
    """Whether a link of `page` leads to a file, and to a heading of it where it names one."""
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    if not heading or target.suffix != ".md":
        return target.exists()
    text = target.read_text(encoding="utf-8")
    records = "<!-- fields: " in text  # whose headings are written from the code
    return heading in {slug(found) for found in _HEADING.findall(text)} or records


def slug(heading: str) -> str:
    """The anchor that mkdocs and GitHub give a heading."""
    return re.sub(
        r"[\s]+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"\{.*\}$", "", heading)).strip().lower()
    )


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What: `x`, and why\n", encoding="utf-8")
    assert leads(page, "#what-x-and-why")
    assert leads(tmp_path / "other.md", "page.md#what-x-and-why")
    assert not leads(page, "#what")
    assert not leads(page, "missing.md")


def exists(name: str) -> bool:
    """Whether `name` is a module, or something that its module has."""
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass  # a part of the name is no module
    module, attribute = name.rsplit(".", 1)
    return importlib.util.find_spec(module) is not None and hasattr(
        importlib.import_module(module), attribute
    )
