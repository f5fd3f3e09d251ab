"""Execute the notebook that the pages show, and write its outputs anew: python -m docs.notebook

Each notebook of docs/examples is executed from its first cell to its last, in an empty folder, and
written back with what its cells print and show. A cell shows its last expression, as in Jupyter,
which this script does not need; a cell that begins with `%%writefile FILE` is written to that file.
Pictures go to docs/images. `python -m docs.write_pages` then puts the notebook into its page.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
IMAGES = ROOT / "docs" / "images"
SVG = "image/svg+xml"
_WRITE_FILE = "%%writefile "


def picture_name(notebook: str, number: int) -> str:
    """Return the file in docs/images of the picture that cell `number` of a notebook shows."""
    return f"{notebook}-{number}.svg"


def executed(cells: list[dict[str, Any]], names: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells with the outputs of executing them in the current folder.

    Args:
        names: the variables of the notebook, which the cells change.

    Raises:
        Exception: what a cell raises.
    """
    done: list[dict[str, Any]] = []
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            done.append(cell)
            continue
        count += 1
        outputs = list(_outputs("".join(cell["source"]), names, count))
        done.append({**cell, "execution_count": count, "outputs": outputs})
    return done


def _outputs(source: str, names: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Execute one cell, and yield what it printed and what it shows."""
    if source.startswith(_WRITE_FILE):
        first, _, text = source.partition("\n")
        name = first.removeprefix(_WRITE_FILE).strip()
        Path(name).write_text(text, encoding="utf-8")
        yield _stream(f"Writing {name}\n")
        return

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        value = _run(source, names)
    if printed.getvalue():
        yield _stream(printed.getvalue())
    if value is not None:
        yield {
            "output_type": "execute_result",
            "execution_count": count,
            "metadata": {},
            "data": _data(value),
        }


def _run(source: str, names: dict[str, Any]) -> Any:
    """Execute statements, and return the value of the last one if it is an expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "notebook", "exec"), names)
    if not isinstance(last, ast.Expr) or source.rstrip().endswith(";"):
        return None
    return eval(compile(ast.Expression(last.value), "notebook", "eval"), names)


def _data(value: Any) -> Mapping[str, list[str]]:
    """Return a value as a notebook has it: as a picture, or as text."""
    drawn = getattr(value, "_repr_svg_", None)
    if drawn is not None:
        return {SVG: _lines(drawn()), "text/plain": [f"<{type(value).__name__}>"]}
    plain = str(value) if type(value).__module__.startswith("planner.") else repr(value)
    return {"text/plain": _lines(plain)}


def _stream(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": _lines(text)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Work in a folder, from which what cells write to files can be imported."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        os.chdir(before)


def main() -> None:
    """Execute all notebooks and write them and their pictures."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, _inside(folder):
            notebook["cells"] = executed(notebook["cells"], {"__name__": "__main__"})
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.relative_to(ROOT))
        for number, svg in pictures(notebook["cells"]):
            drawn = IMAGES / picture_name(path.stem, number)
            drawn.write_text(svg, encoding="utf-8")
            print(drawn.relative_to(ROOT))


def pictures(cells: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the pictures that executed cells show, with the number of the cell."""
    for number, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            if SVG in output.get("data", {}):
                yield number, "".join(output["data"][SVG])


if __name__ == "__main__":
    main()
