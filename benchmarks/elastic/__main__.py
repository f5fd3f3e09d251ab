"""How long a run takes to go on after a fault, and whether it computes the same. See README.md in
this folder.

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
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.elastic.copies import measure_copies
from benchmarks.elastic.faults import BRIEFLY, EVERY, KINDS, measure, run
from benchmarks.elastic.hook.sitecustomize import START

RESULTS = Path(__file__).with_name("results.json")
_TIMES = ("noticed_s", "began_s", "imported_s", "went_on_s")  # from the fault


def main() -> int:
    """Run, and print the tables; return 1 when a promise was broken, or when fewer faults happened
    than were asked.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=1, help="workers of a host")
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--replicated", action="store_true", help="stages have two replicas")
    parser.add_argument(
        "--second", type=int, default=0, metavar="N", help="of the faults, those during a recovery"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--copies", action="store_true", help="measure what copies cost, without faults"
    )
    parser.add_argument(
        "--save", action="store_true", help=f"add to {RESULTS.name} beside this file"
    )
    parser.add_argument(
        "--total", action="store_true", help="run nothing, and print what has been saved"
    )
    args = parser.parse_args()
    saved: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    if not args.total:
        portion: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "seed": args.seed,
            "hosts": args.hosts,
        }
        if args.copies:
            portion["copies"] = measure_copies(args.hosts)
        else:
            draw = random.Random(args.seed)
            how: dict[str, Any] = {
                "replicated": args.replicated,
                "seconds": args.second,
                "measured": measure(args.hosts * args.per_host),
            }
            outcome = run(args.hosts, args.per_host, args.faults, args.steps, draw, **how)
            faults = [vars(fault) for fault in outcome.faults]
            portion |= {
                "per_host": args.per_host,
                "replicated": args.replicated,
                "start_s": outcome.start_s,
            }
            portion |= {"faults": faults, "problems": outcome.problems, "speeds": outcome.speeds}
            portion |= {"asked": args.faults, "asked_second": args.second}
            portion |= {"whole_s": outcome.whole_s, "stood_s": outcome.stood_s}
        if args.save:
            RESULTS.write_text(json.dumps([*saved, portion], indent=1) + "\n", encoding="utf-8")
        saved = [portion]
    print(tables(saved))
    lacks = [lack for portion in saved for lack in lacking(portion)]
    for lack in lacks:
        sys.stderr.write(f"{lack}\n")
    return 1 if lacks or any(portion.get("problems") for portion in saved) else 0


def lacking(portion: dict[str, Any]) -> list[str]:
    """Say what a run shows nothing of, because fewer faults happened than were asked; nothing where
    all did.
    """
    if "asked" not in portion:  # of a version that did not note it, or without faults
        return []
    faults = portion["faults"]
    if len(faults) < portion["asked"]:
        return [
            f"only {len(faults)} of {portion['asked']} faults happened before the run ended: give "
            f"it more --steps"
        ]
    seconds = sum(fault["second"] for fault in faults)
    if seconds < portion["asked_second"]:
        return [
            f"only {seconds} of {portion['asked_second']} faults happened during a recovery: give "
            f"it more --faults"
        ]
    return []


def tables(portions: list[dict[str, Any]]) -> str:
    """Return the tables of faults and of the cost of copies."""
    faults = [fault for portion in portions for fault in portion.get("faults", ())]
    rows = []
    for kind, starting in product((*KINDS, BRIEFLY), (False, True)):
        own = [
            fault
            for fault in faults
            if fault["kind"] == kind and (fault["phase"] in START) == starting
        ]
        timed = [fault for fault in own if fault["went_on_s"] is not None and not fault["paused"]]
        if timed:
            times = [[fault[name] for fault in timed if fault[name] is not None] for name in _TIMES]
            noticed, began, imported, went_on = (
                statistics.median(each) if each else 0.0 for each in times
            )
            spent = [noticed, began - noticed, imported - began, went_on - imported]
            known = [bool(each) and kind in KINDS for each in times]
            numbers = [f"{x:.1f}" if there else "" for x, there in zip(spent, known, strict=True)]
            name = f"{kind}, in a start" if starting else kind
            rows.append([name, len(own), f"{went_on:.1f}", f"{max(times[-1]):.1f}", *numbers])
            rows[-1].append(max(fault["repeated"] for fault in timed))
    headers = [
        "fault",
        "times",
        "median s to the next update",
        "longest",
        "until noticed",
        "until processes begin",
    ]
    headers += ["their imports", "then", "most repeated"]
    parts = [tabulate(rows, headers, tablefmt="github", disable_numparse=True)] if rows else []
    phases = Counter(fault["phase"] for fault in faults)
    if phases:
        parts.append("Faults by what the worker that was hit did: " + _counted(phases) + ".")
    runs = [portion for portion in portions if "faults" in portion]
    if runs:
        starts = statistics.median(portion["start_s"] for portion in runs)
        problems = [problem for portion in runs for problem in portion["problems"]]
        parts.append(
            f"{len(faults)} faults in {len(runs)} runs, copies every {EVERY} minibatches; a first "
            f"start takes"
        )
        parts[-1] += f" {starts:.1f} s from process to update; {len(problems)} promises broken"
        parts += [f"- {problem}" for problem in problems]
        parts += filter(None, map(_standstill, runs))
    speeds: dict[tuple[str, float], list[float]] = {}
    for portion in portions:
        for config, predicted, measured in portion.get("speeds", ()):
            speeds.setdefault((config, predicted), []).append(measured)
    if speeds:
        rows = [[w, len(own), f"{p:.3f}", f"{(m := statistics.median(own)):.3f}", f"{p / m - 1:+.1%}"]
                for (w, p), own in sorted(speeds.items())]  # fmt: skip
        headers = ["plan", "runs", "predicted s per minibatch", "measured, median", "error"]
        parts.append(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    for portion in portions:
        if "copies" in portion:
            parts.append(
                tabulate(
                    portion["copies"], headers="keys", tablefmt="github", disable_numparse=True
                )
            )
    return "\n\n".join(parts)


def _standstill(portion: dict[str, Any]) -> str:
    """Say for how long training stood still in a run, and how many faults it had; empty for older
    runs.
    """
    stood_s = portion.get("stood_s")
    if not stood_s:
        return ""
    faults = portion["faults"]
    seconds = sum(fault["second"] for fault in faults)
    share = sum(stood_s) / portion["whole_s"]
    times = (
        f"{len(stood_s)} times, {sum(stood_s):.0f} s of {portion['whole_s']:.0f} s ({share:.0%})"
    )
    each = f"median {statistics.median(stood_s):.1f} s, longest {max(stood_s):.1f} s"
    what = (
        f"seed {portion['seed']}, {portion['hosts']} hosts, {len(faults)} faults, {seconds} "
        f"of them second ones"
    )
    return f"{what}: training stood still {times}, {each}"


def _counted(phases: Counter[str]) -> str:
    return ", ".join(f"{phase} {count}" for phase, count in phases.most_common())


if __name__ == "__main__":
    sys.exit(main())
