"""How long a run takes to go on after a fault, and whether it computes the same. See README.md in this folder.

python -m benchmarks.elastic --faults 10 --seed 0 --save      # add to results.json
python -m benchmarks.elastic --copies --save                  # the cost of copies
python -m benchmarks.elastic --total                          # the tables of all that is saved
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.elastic.copies import measure_copies
from benchmarks.elastic.faults import EVERY, KINDS, run

RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Run, and print the tables; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=1, help="workers of a host")
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", action="store_true", help="measure what copies cost, without faults")
    parser.add_argument("--save", action="store_true", help=f"add to {RESULTS.name} beside this file")
    parser.add_argument("--total", action="store_true", help="run nothing, and print what has been saved")
    args = parser.parse_args()
    saved: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    if not args.total:
        portion: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "seed": args.seed, "hosts": args.hosts}
        if args.copies:
            portion["copies"] = measure_copies(args.hosts)
        else:
            outcome = run(args.hosts, args.per_host, args.faults, args.steps, random.Random(args.seed))
            faults = [vars(fault) for fault in outcome.faults]
            portion |= {"per_host": args.per_host, "start_s": outcome.start_s}
            portion |= {"faults": faults, "problems": outcome.problems, "speeds": outcome.speeds}
        if args.save:
            RESULTS.write_text(json.dumps([*saved, portion], indent=1) + "\n", encoding="utf-8")
        saved = [portion]
    print(tables(saved))
    return 1 if any(portion.get("problems") for portion in saved) else 0


def tables(portions: list[dict[str, Any]]) -> str:
    """Return the tables of faults and of the cost of copies."""
    faults = [fault for portion in portions for fault in portion.get("faults", ())]
    rows = []
    for kind in KINDS:
        own = [fault for fault in faults if fault["kind"] == kind]
        if own:
            went_on, began = ([fault[key] for fault in own] for key in ("went_on_s", "began_s"))
            start_up = [fault["went_on_s"] - fault["began_s"] for fault in own]
            numbers = [statistics.median(went_on), max(went_on), statistics.median(began), statistics.median(start_up)]
            rows.append([kind, len(own), *(f"{x:.1f}" for x in numbers), max(fault["repeated"] for fault in own)])
    headers = ["fault", "times", "median s to the next update", "longest", "until processes begin", "then", "repeated"]
    parts = [tabulate(rows, headers, tablefmt="github", disable_numparse=True)] if rows else []
    runs = [portion for portion in portions if "faults" in portion]
    if runs:
        starts = statistics.median(portion["start_s"] for portion in runs)
        problems = [problem for portion in runs for problem in portion["problems"]]
        parts.append(f"{len(faults)} faults in {len(runs)} runs, copies every {EVERY} minibatches; a first start takes")
        parts[-1] += f" {starts:.1f} s from process to update; {len(problems)} promises broken"
        parts += [f"- {problem}" for problem in problems]
    speeds: dict[tuple[int, float], list[float]] = {}
    for portion in portions:
        for workers, predicted, measured in portion.get("speeds", ()):
            speeds.setdefault((workers, predicted), []).append(measured)
    if speeds:
        rows = [[w, len(own), f"{p:.3f}", f"{(m := statistics.median(own)):.3f}", f"{p / m - 1:+.1%}"]
                for (w, p), own in sorted(speeds.items())]  # fmt: skip
        headers = ["workers", "runs", "predicted s per minibatch", "measured, median", "error"]
        parts.append(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    for portion in portions:
        if "copies" in portion:
            parts.append(tabulate(portion["copies"], headers="keys", tablefmt="github", disable_numparse=True))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
