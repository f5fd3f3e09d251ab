"""Measure one part of the headlines in a process of its own, so that no part sees what another one
left: its memory, its imports, or its caches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.headlines.parts import PARTS, NotHereError
from benchmarks.kept import ROOT


def measure_alone(part: str) -> dict[str, float]:
    """Return the numbers of a part.

    Raises:
        NotHereError: where the part cannot run here.
        RuntimeError: where it failed; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", __name__, part, str(path)], cwd=ROOT, check=False
        )
        if done.returncode:
            raise RuntimeError(f"'{part}' ended with exit code {done.returncode}")
        answer = json.loads(path.read_text(encoding="utf-8"))

    if "not_here" in answer:
        raise NotHereError(answer["not_here"])
    found: dict[str, float] = answer["found"]
    return found


def _main(part: str, path: Path) -> None:
    try:
        answer: dict[str, object] = {"found": PARTS[part]()}
    except NotHereError as reason:
        answer = {"not_here": str(reason)}
    path.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
