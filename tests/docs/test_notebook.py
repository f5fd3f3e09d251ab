"""The notebook runs from its first cell to its last, and its outputs are those of today's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs import notebook, write_pages

CELLS: list[dict[str, Any]] = json.loads(
    (notebook.EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8")
)["cells"]
# Cells from here on measure and train on this machine; those before give the same everywhere.
MEASURES = "planner.profile("


def test_cells_print_show_and_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [
        "# title",
        "%%writefile mine.txt\nhello\n",
        "x = 2\nprint(x)\nx + 1",
        "x;",
        "class Drawn:\n    def _repr_svg_(self): return '<svg/>'\n\nDrawn()",
    ]
    kinds = ["markdown", *["code"] * 4]
    cells = [
        {"cell_type": kind, "source": source.splitlines(keepends=True)}
        for kind, source in zip(kinds, sources, strict=True)
    ]
    done = notebook.executed(cells, {})
    assert done[0] == cells[0]
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "hello\n"
    printed, shown = done[2]["outputs"]
    assert printed["text"] == ["2\n"]
    assert shown["data"] == {"text/plain": ["3"]}
    assert done[3]["outputs"] == []
    assert list(notebook.pictures(done)) == [(4, "<svg/>")]
    assert [cell.get("execution_count") for cell in done] == [None, 1, 2, 3, 4]


def test_a_cell_that_fails_ends_the_run() -> None:
    with pytest.raises(ZeroDivisionError):
        notebook.executed([{"cell_type": "code", "source": ["1 / 0"]}], {})


def test_every_cell_of_code_was_executed_and_the_page_shows_its_outputs() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    page = write_pages.notebook("notebook.ipynb")
    for number, svg in notebook.pictures(CELLS):
        name = notebook.picture_name("notebook", number)
        assert (notebook.IMAGES / name).read_text(encoding="utf-8") == svg
        assert f"](images/{name})" in page
    assert "plan.compare(profile)" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_plans_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    done = notebook.executed(CELLS, names)
    measures = next(
        number for number, cell in enumerate(CELLS) if MEASURES in "".join(cell["source"])
    )
    for before, after in zip(CELLS[:measures], done, strict=False):
        assert after == before, "python -m docs.notebook"
    assert names["result"].workers == 2
    assert names["result"].losses[-1].loss < names["result"].losses[0].loss / 2
    assert names["right"].float().mean() > 0.8
    assert (tmp_path / "report.html").exists()
