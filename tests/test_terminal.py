"""What others named or said does not command the terminal."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.cli.output import print_complaint, print_progress
from planner.terminal import PrintableFormatter, ProgressLine, printable, printable_json

PACKAGE = Path(__file__).parents[1] / "planner"
EVIL = "a\x1b[2J\x07\r\x9b31m\u202eb\u2028c\x7f\x00"
HARMLESS = r"a\x1b[2J\x07\r\x9b31m\u202eb\u2028c\x7f\x00"
ESCAPES = {"printable", "printable_json"}
# Their standard error is read by a process of ours, which prints it.
_PIPED = ("profiler/measured/other_processes.py", "workers/start_here.py")


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable(EVIL) == HARMLESS
    assert (
        printable("two lines\n\tof Ümläut 模型 \U0001f600")
        == "two lines\n\tof Ümläut 模型 \U0001f600"
    )


def test_a_json_document_keeps_its_values() -> None:
    document = json.dumps({EVIL: [EVIL, 1]}, ensure_ascii=False, indent=1)
    shown = printable_json(document)
    assert json.loads(shown) == {EVIL: [EVIL, 1]}
    assert printable(shown) == shown


def test_messages_progress_and_warnings_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    print_complaint("error", EVIL, EVIL)
    print_progress(EVIL)
    ProgressLine().show(EVIL)
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("warning: %(message)s"))
    handler.handle(logging.makeLogRecord({"msg": "%s", "args": (EVIL,)}))
    told = capsys.readouterr().err
    assert (
        told
        == f"error: {HARMLESS}\nhint: {HARMLESS}\n{HARMLESS}\n\r{HARMLESS}warning: {HARMLESS}\n"
    )


def _prints() -> Iterator[tuple[str, ast.Call]]:
    """Yield all calls in the package that write to the terminal, with their places."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and name not in _PIPED:
                called = ast.unparse(node.func)
                if called in ("print", "print_result", "sys.stderr.write", "sys.stdout.write"):
                    yield f"{name}:{node.lineno}", node


def _is_safe(node: ast.AST) -> bool:
    calls = [ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return isinstance(node, ast.Constant) or "json.dumps" in calls or bool(ESCAPES & {*calls})


def test_all_that_the_package_prints_is_printable() -> None:
    """A print that is not would be found by somebody with a model of an evil name."""
    prints = list(_prints())
    assert len(prints) > 8
    unsafe = [place for place, call in prints if not all(_is_safe(each) for each in call.args)]
    # A progress line writes carriage returns around a text that it has made printable, and
    # print_result() prints what its callers have made so.
    assert [
        place for place in unsafe if not place.startswith(("terminal.py:", "cli/results.py:"))
    ] == []
