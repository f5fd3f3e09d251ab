"""The table of packages is complete, and says of their order what import-linter checks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_table_has_every_package_in_the_order_of_the_layers() -> None:
    tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (ROOT / "docs" / "contributing.md").read_text("utf-8")
    table = page.partition("| package | contains |")[2].partition("\n\n")[0]
    rows = [
        re.findall(r"`(\w+)(?:/|\.py)`", line.split(" | ")[0]) for line in table.splitlines()[2:]
    ]
    assert rows == [layer.split(" | ") for layer in layers]
