"""The rows of Table 1, and how they are reported."""

from __future__ import annotations

from benchmarks.pipedream_table1.__main__ import report, table1
from benchmarks.published_rows import Ran


def test_the_seven_published_rows() -> None:
    rows = table1()
    assert [row.config for row in rows] == ["2-1-1", "7-1", "9-5-1-1", "7-1", "8", "7-1", "2-1-1"]
    assert all(row.data_parallel_over_one is not None for row in rows)
    assert len({row.name for row in rows}) == len(rows)  # results are kept by name


def test_published_numbers_stand_beside_ours() -> None:
    row = table1()[1]
    text = report({row.name: Ran(1.25e9, "7-1", 6.9, 2.3, None, 0.94, 1.01)})
    line = next(line for line in text.splitlines() if line.startswith("| vgg16"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == ["10.00", "7-1", "7.04", "2.99", "95%", "7-1", "6.90", "3.00", "94%", "1.01", "2.35", "2.30"]
    assert text.endswith("At least the published speed-up over BSP in 1 of 1 rows.")
