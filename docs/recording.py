"""Record the terminal sessions that the pages show: python -m docs.recording [NAME ...]

Each file of docs/recordings is a session: lines that begin with "$ " are typed into a shell in an
empty folder, with the repository's `profiles` beside them, and what the commands print follows.
This script types them again and replaces what they print. Those in PICTURES are drawn, too.
`python -m docs.write_pages` then puts the sessions into the pages.

A script of the session's name, NAME.sh, prepares the folder; pages do not show it. An answer that
would be another one on a slower machine is not recorded. Sessions about models by name need the
package transformers, and those about adapters also peft.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from planner.cli.colours import coloured

ROOT = Path(__file__).resolve().parents[1]
SESSIONS = ROOT / "docs" / "recordings"
IMAGES = ROOT / "docs" / "images"
PICTURES = ("fit-llama",)
PROMPT = "$ "
COLUMNS = 118
# in answers that depend on how fast the machine is
TIME_ENDED = ("the time ended", "the time limit ended", "stopped early")

# of the drawn terminal, in pixels and seconds
_CHARACTER, _LINE, _MARGIN = 7.25, 17, 14
_BETWEEN_LINES_S, _BEFORE_ANSWER_S = 0.06, 1.2
_GROUND, _INK, _MUTED = "#0d1117", "#e6edf3", "#8b949e"
_STYLES = {"31": "fill:#ff7b72", "33": "fill:#e3b341", "1": "font-weight:bold"}
_NAME = re.compile(r"\$ |[a-z]+(?: [a-z]+)?  +|[a-zA-Z]+: ")  # a prompt, "fits    ", or "note: "
_STYLED = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m", re.DOTALL)


def commands(session: str) -> list[str]:
    """Return the commands of a session, continued lines included."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)", session, re.MULTILINE)


def recorded(typed: Sequence[str], preparation: Path | None = None) -> str:
    """Type commands into a shell, one after the other, and return the session.

    Args:
        typed: the commands. `cd FOLDER` holds for those after it.
        preparation: a script that runs first in the same folder, with the repository's as argument.
    """
    parts = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "profiles").symlink_to(ROOT / "profiles")
        plan = folder / "bin" / "plan"
        plan.parent.mkdir()
        plan.write_text(f'#!/bin/sh\nexec {sys.executable} -m planner "$@"\n', encoding="utf-8")
        plan.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{plan.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": str(COLUMNS),
        }
        if preparation is not None:
            _printed(f"bash {preparation} {ROOT}", folder, environment)

        for command in typed:
            if command.startswith("cd "):
                folder /= command.removeprefix("cd ")
                parts.append(f"{PROMPT}{command}")
                continue
            answer = _printed(command, folder, environment)
            if any(words in answer for words in TIME_ENDED):
                sys.exit(f"{command}\nits answer depends on how fast this machine is:\n{answer}")
            parts.append(f"{PROMPT}{command}\n{answer.rstrip()}".rstrip())
    return "\n\n".join(parts) + "\n"


def _printed(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Return what a command prints in a folder; end this script where it fails."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command}\n{done.stderr}")
    return done.stdout


def preparation_of(session: Path) -> Path | None:
    """Return the script that prepares a session's folder, if it has one."""
    script = session.with_suffix(".sh")
    return script if script.exists() else None


def picture(session: str) -> str:
    """Draw a session as a terminal, whose lines appear one after the other."""
    lines = list(_timed_lines(session))
    width = _CHARACTER * max(len(line) for line, _, _ in lines) + 2 * _MARGIN
    height = _LINE * len(lines) + 2 * _MARGIN
    rows = [
        f'<text xml:space="preserve" x="{_MARGIN}" y="{_MARGIN + _LINE * (row + 0.75):.1f}" '
        f'style="animation-delay:{at_s:.2f}s">{drawn}</text>'
        for row, (_, drawn, at_s) in enumerate(lines)
    ]
    style = (
        f"text{{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:{_INK};"
        "animation:appear 0.01s both}@keyframes appear{from{opacity:0}to{opacity:1}}"
        "@media(prefers-reduced-motion:reduce){text{animation:none}}"
    )
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{style}</style>",
            f'<rect {size} rx="8" fill="{_GROUND}"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _timed_lines(session: str) -> Iterator[tuple[str, str, float]]:
    """Yield each line as text, as SVG, and when it appears."""
    at_s = 0.0
    for line in _wrapped(session.rstrip().splitlines()):
        if line.startswith(PROMPT):
            yield line, f'<tspan fill="{_MUTED}">$</tspan> {escape(line[len(PROMPT) :])}', at_s
            at_s += _BEFORE_ANSWER_S
        else:
            yield line, _as_spans(coloured(line)), at_s
            at_s += _BETWEEN_LINES_S


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Wrap lines as a terminal of so many columns does, at words: a longer one would make all of
    the picture small. The rest of a named value stands below the value.
    """
    for line in lines:
        name = _NAME.match(line)
        indent = " " * len(name[0]) if name else ""
        yield from textwrap.wrap(line, COLUMNS, subsequent_indent=indent) or [""]


def _as_spans(line: str) -> str:
    """Return a line with a terminal's colours as spans of SVG."""
    parts = _STYLED.split(line)
    drawn = escape(parts[0])
    for code, styled, plain in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        drawn += f'<tspan style="{_STYLES[code]}">{escape(styled)}</tspan>{escape(plain)}'
    return drawn


def main(names: Sequence[str]) -> None:
    """Record the named sessions, or all, and draw those that pages show as pictures."""
    for path in sorted(SESSIONS.glob("*.txt")):
        if names and path.stem not in names:
            continue
        typed = commands(path.read_text(encoding="utf-8"))
        session = recorded(typed, preparation_of(path))
        path.write_text(session, encoding="utf-8")
        print(path.relative_to(ROOT))
        if path.stem in PICTURES:
            drawn = IMAGES / f"{path.stem}.svg"
            drawn.write_text(picture(session), encoding="utf-8")
            print(drawn.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
