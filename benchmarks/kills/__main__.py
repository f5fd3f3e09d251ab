"""Check that runs survive random kills with bitwise equal results. See README.md in this folder.

python -m benchmarks.kills --kills 100 --save
python -m benchmarks.kills --total              # of all saved portions, each with its own seed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.kills.run import Kill, Outcome, killed, reference

SHAPES = (("1-1", "1f1b"), ("2-1", "1f1b"), ("1-1-1", "1f1b-flush"))
RESULTS = Path(__file__).parent / "results.json"


def main() -> int:
    """Kill, compare, and print the table; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=5, help="kills that one run survives")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save",
        action="store_true",
        help=f"add to {RESULTS.name} beside this file; replaces what has the same seed",
    )
    parser.add_argument(
        "--total", action="store_true", help="run nothing, and print what has been saved"
    )
    arguments = parser.parse_args()
    if arguments.total:
        portions = _saved()
        kills = [Kill(**kill) for portion in portions for kill in portion["kills"]]
        return _report(
            kills,
            sum(each["runs"] for each in portions),
            [p for each in portions for p in each["problems"]],
        )
    load = os.getloadavg()[0]
    outcomes = measure(arguments.kills, arguments.per_run, arguments.seed)
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    if arguments.save:
        portion = {
            "seed": arguments.seed,
            "date": time.strftime("%Y-%m-%d"),
            # load average of the last minute, before and after
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
            "runs": len(outcomes),
            "kills": [vars(kill) for kill in kills],
            "problems": problems,
        }
        others = [each for each in _saved() if each["seed"] != arguments.seed]
        RESULTS.write_text(json.dumps([*others, portion], indent=1) + "\n", encoding="utf-8")
    return _report(kills, len(outcomes), problems)


def _saved() -> list[dict[str, Any]]:
    portions: list[dict[str, Any]] = (
        json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    )
    return portions


def _report(kills: Sequence[Kill], runs: int, problems: Sequence[str]) -> int:
    print(table(kills))
    print(f"\n{len(kills)} kills in {runs} runs, {len(problems)} promises broken")
    for problem in problems:
        print(f"- {problem}")
    return 1 if problems else 0


def measure(kills: int, per_run: int, seed: int) -> list[Outcome]:
    """Run each shape in turn until there were `kills` kills."""
    draw = random.Random(seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        for shape in SHAPES:
            (folder / "-".join(shape)).mkdir()
        expected = {shape: reference(*shape, folder / "-".join(shape)) for shape in SHAPES}
        while (left := kills - sum(len(outcome.kills) for outcome in outcomes)) > 0:
            shape = SHAPES[len(outcomes) % len(SHAPES)]
            own = folder / "-".join(shape)
            outcome = killed(*shape, own, expected[shape], min(per_run, left), draw)
            outcomes.append(outcome)
            _tell(shape, outcome, kills - left)
    return outcomes


def table(kills: Sequence[Kill]) -> str:
    """Return a row per signal and activity of the worker: how often, and how long until the run
    reported it.
    """
    groups: dict[tuple[str, str], list[Kill]] = {}
    for kill in kills:
        groups.setdefault((kill.signal, _kind(kill.activity)), []).append(kill)
    rows = []
    for (signal, activity), group in sorted(groups.items()):
        told = sorted(kill.told_s for kill in group if kill.told_s is not None)
        rows.append(
            [
                signal,
                activity,
                len(group),
                sum(kill.named for kill in group),
                f"{told[len(told) // 2]:.1f}" if told else "-",
                f"{told[-1]:.1f}" if told else "-",
            ]
        )
    headers = ["signal", "worker was", "kills", "named", "median s until told", "longest"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _kind(activity: str) -> str:
    if activity.startswith("while"):
        return activity
    return " ".join(activity.split(" of ")[0].split(" after ")[0].split())


def _tell(shape: tuple[str, str], outcome: Outcome, before: int) -> None:
    done = before + len(outcome.kills)
    print(
        f"{done} kills: {' '.join(shape)} {'; '.join(outcome.problems) or 'as promised'}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
