"""Whether a change of the code changed an answer: see README.md."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.same_answers.questions import answer, questions

SHOWN = 3  # differences of one answer


def main(argv: Sequence[str] | None = None) -> int:
    """Save the answers, or compare them with saved ones and print the differences."""
    args = _parse(argv)
    started = time.perf_counter()
    names = [name for name in questions() if args.only in name]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        answers = dict(zip(names, pool.map(answer, names), strict=True))
    answers = json.loads(json.dumps(answers))  # JSON has no tuples
    print(f"{len(answers)} answers in {time.perf_counter() - started:.0f} s", file=sys.stderr)

    if args.save:
        args.file.write_bytes(gzip.compress(json.dumps(answers, sort_keys=True).encode()))
        return 0
    return _compare(json.loads(gzip.decompress(args.file.read_bytes())), answers)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_answers", description=__doc__)
    parser.add_argument("file", type=Path, help="answers, as gzipped JSON")
    parser.add_argument(
        "--save", action="store_true", help="write the answers to the file instead of comparing"
    )
    parser.add_argument("--only", default="", help="only questions whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="(default: %(default)s)")
    return parser.parse_args(argv)


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    different = 0
    for name, found in now.items():
        if name not in before:
            print(f"{name}: no answer was saved")
            different += 1
            continue
        changes = list(differences(before[name], found))
        different += bool(changes)
        for change in changes[:SHOWN]:
            print(f"{name}: {change}")
    print(f"{len(now) - different} of {len(now)} answers are equal field by field")
    return 1 if different else 0


def differences(expected: object, found: object, place: str = "") -> Iterator[str]:
    """Where two JSON values differ; fields that only the new one has are differences, too."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted({*expected, *found}):
            if key not in expected or key not in found:
                yield f"{place}.{key} only {'before' if key in expected else 'now'}"
            else:
                yield from differences(expected[key], found[key], f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif expected != found:
        yield f"{place} was {expected}, is {found}"
