"""The wheel and the source distribution hold what an installation needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from docs.package_page import description
from planner.version import __version__

ROOT = Path(__file__).resolve().parents[1]
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, built from a copy without the version control's files."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "docs").mkdir()
    for name in ("pyproject.toml", "docs/package-page.md", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(
        ROOT / "planner", tree / "planner", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tree / "dist"


def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob(f"pipeline_planner-{__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("planner/")}
        (metadata,) = (
            archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")
        )
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "planner").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == expected
    assert "planner/py.typed" in held
    assert "Requires-Python: <3.14,>=3.10" in metadata


def test_the_source_distribution_builds_the_same_package(built: Path) -> None:
    (sdist,) = built.glob(f"pipeline_planner-{__version__}.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "docs/package-page.md",
        "LICENSE",
        "planner/py.typed",
        "planner/reporting/page/html/page.js",
    } <= names


def test_the_page_on_the_package_index_has_only_links_that_work_there(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    page = metadata.get_payload()
    assert isinstance(page, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "planner finds the fastest way to train" in page
    targets = re.findall(r"\]\(([^()\s]+)\)", page)
    assert targets  # badges
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    assert "<!--" not in page


def test_relative_links_become_names_or_lead_to_the_repository() -> None:
    readme = (
        "[![CI](../../ci.svg)](../../ci.yml)\n[![P](https://x/p)](LICENSE)\n"
        "<!-- a note -->\n\n[a page](docs/a.md#b), [a site](https://y), [below](#here), "
        "![what is seen](docs/a.png)\n"
    )
    assert description(readme) == (
        "![P](https://x/p)\na page, [a site](https://y), [below](#here), *what is seen*\n"
    )
    assert description(readme, "https://forge/us") == (
        "![P](https://x/p)\n[a page](https://forge/us/blob/HEAD/docs/a.md#b), [a site](https://y), "
        "[below](#here), ![what is seen](https://forge/us/raw/HEAD/docs/a.png)\n"
    )
