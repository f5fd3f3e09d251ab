"""Measure for how long training stands still while a run moves, by the size of its state.

    python -m benchmarks.testbed.replan.standing --save

Two real processes over gloo; one block of eight moves from one to the other. The state is weights
in float32 and both moments of AdamW.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from benchmarks.kept import Results
from benchmarks.testbed.replan.forced import Forced
from planner.formats.files import write_text

FOLDER = Path(__file__).parent
BLOCKS = 8
STATE_BYTES = 12  # per parameter: the weight and two moments in float32
WIDTHS = (320, 2280)  # 10 and 500 MB
MOVES = 3
STEPS = 42


@dataclass(frozen=True)
class Row:
    """Moves of one state."""

    width: int
    state_bytes: int
    moved_bytes: int
    seconds: list[float]
    same_processes: bool


def measured(width: int) -> Row:
    """Let a run move to and fro, and return for how long it stood still."""
    with tempfile.TemporaryDirectory() as name:
        forced = Forced.of(Path(name), width, BLOCKS, MOVES)
        result = forced.train(STEPS)
        same = all(len(ids) == 1 for ids in forced.process_ids())
    parameters = width * width + width
    return Row(
        width=width,
        state_bytes=STATE_BYTES * BLOCKS * parameters,
        moved_bytes=STATE_BYTES * parameters,
        seconds=[move.seconds for move in result.moves],
        same_processes=same,
    )


def main() -> None:
    """Measure all sizes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    results = Results(FOLDER, save=arguments.save)
    rows = results.measured("standing", Row, ((str(width), measured(width)) for width in WIDTHS))
    cells = [
        [
            each.state_bytes / 1e6,
            median(each.seconds),
            min(each.seconds),
            max(each.seconds),
            len(each.seconds),
            "yes" if each.same_processes else "no",
        ]
        for each in rows.values()
    ]
    headers = ("state, MB", "stood still, s", "least", "most", "moves", "same processes")
    table = tabulate(
        cells, headers=headers, floatfmt=("", ".0f", ".2f", ".2f", ".2f"), tablefmt="github"
    )
    text = f"Measured: {results.about('standing')}\n\n{table}"
    print(text)
    if arguments.save:
        write_text(FOLDER / "standing.md", text + "\n")


if __name__ == "__main__":
    main()
