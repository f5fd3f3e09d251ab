"""Whether a change of the code changed an answer: plans of 15 profiles and streams of all schedules; see README.md."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import planner

PROFILES = Path(__file__).parents[2] / "profiles"
SCHEDULES = ("1f1b", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved")
DIVIDED = ("2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved")
# What differs between two runs of the same code.
IGNORED = {"seconds", "provenance"}

Case = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Save the answers, or compare them with saved ones and print the differences."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_answers", description=__doc__)
    parser.add_argument("file", type=Path, help="answers, as gzipped JSON")
    parser.add_argument("--save", action="store_true", help="write the answers to the file instead of comparing")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    names = [name for name in cases() if args.only in name]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        found = dict(zip(names, pool.map(answer, names), strict=True))
    print(f"{len(found)} answers in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if args.save:
        args.file.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode()))
        return 0
    expected = json.loads(gzip.decompress(args.file.read_bytes()))
    different = 0
    for name in names:
        changes = list(differences(expected[name], json.loads(json.dumps(found[name]))))
        different += bool(changes)
        for change in changes[:3]:
            print(f"{name}: {change}")
    print(f"{len(names) - different} of {len(names)} answers are equal field by field")
    return 1 if different else 0


def cases() -> dict[str, Case]:
    """Arguments of every case, by its name."""
    found: dict[str, Case] = {}
    for path in sorted(PROFILES.glob("*/cpu.json")):
        model = path.parent.name
        for cluster, schedule in itertools.product(("flat8", "levels4x2"), SCHEDULES):
            found[f"plan/{model}/{cluster}/{schedule}"] = {"cluster": cluster, "schedule": schedule}
        for schedule in ("1f1b", "2bw", "1f1b-flush"):
            found[f"plan/{model}/tight8/{schedule}"] = {"cluster": "tight8", "schedule": schedule}
        found[f"plan/{model}/tight4x2/gpipe"] = {"cluster": "tight4x2", "schedule": "gpipe"}
        found[f"plan/{model}/flat4/never"] = {"cluster": "flat4", "recompute": "never", "depth": "published"}
    for schedule in SCHEDULES:
        found[f"stream/{schedule}"] = {"schedule": schedule}
    return found


def answer(name: str) -> object:
    """The answer to the case of that name, as JSON."""
    case = cases()[name]
    kind, *rest = name.split("/")
    return stream_digests(case["schedule"]) if kind == "stream" else plan_answer(rest[0], case)


def plan_answer(model: str, case: Case) -> object:
    """A plan, its timeline's digest, or that there is none."""
    profile = planner.load_profile(PROFILES / model / "cpu.json")
    schedule = case.get("schedule", "1f1b")
    cluster = make_cluster(case["cluster"], profile)
    options = {key: value for key, value in case.items() if key != "cluster"}
    microbatches = 2 * cluster.gpus if schedule in DIVIDED else 1
    try:
        plan = planner.solve(profile, cluster, microbatches=microbatches, **options)
    except planner.PlannerError as error:
        return {"error": type(error).__name__}
    timeline = without(planner.simulate(plan, 12).model_dump(mode="json"))
    digest = hashlib.sha256(json.dumps(timeline, sort_keys=True).encode()).hexdigest()
    return {"plan": without(plan.model_dump(mode="json")), "timeline": digest}


def make_cluster(name: str, profile: planner.Profile) -> planner.Cluster:
    """Clusters of 4 or 8 devices, flat or of two levels, some with memory for little more than the model."""
    sizes = {"flat4": [4], "flat8": [8], "tight8": [8], "levels4x2": [4, 2], "tight4x2": [4, 2]}[name]
    bandwidths = [1.25e9, 1.25e8] if len(sizes) == 2 else [2.5e8]
    held = sum(4 * layer.weight_bytes + layer.saved_bytes for layer in profile.layers)
    levels = [
        {"size": size, "bandwidth_bytes_per_s": bandwidth, "latency_s": 1e-4}
        for size, bandwidth in zip(sizes, bandwidths, strict=True)
    ]
    memory_bytes = int(held / 3) if name.startswith("tight") else None
    return planner.Cluster.model_validate({"levels": levels, "memory_bytes": memory_bytes})


def without(value: object) -> object:
    """The same JSON without what differs between two runs of the same code."""
    if isinstance(value, Mapping):
        return {key: without(item) for key, item in value.items() if key not in IGNORED}
    return [without(item) for item in value] if isinstance(value, list) else value


def stream_digests(schedule: str) -> dict[str, str]:
    """A digest of every worker's instructions, for all shapes of the tests that the schedule has."""
    from planner.schedule.schedule import stream

    digests = {}
    for label, shape in shapes(schedule):
        for stage, ranks in enumerate(shape.ranks):
            for rank in ranks:
                if shape.first_stages[rank] == stage:
                    text = "\n".join(map(repr, stream(shape, stage, rank, 5)))
                    digests[f"{label} rank {rank}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return digests


def shapes(schedule: str) -> Iterator[tuple[str, Any]]:
    """Shapes: flat and replicated, with a skip, with tied weights, divided."""
    from planner.schedule.registry import find
    from planner.schedule.schedule import Channel, PipelineShape

    chunks = 2 if schedule == "interleaved" else 1
    for replicas in ((1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1, 2), (2, 1, 1), (1, 1, 1, 1), (2, 2, 2)):
        if chunks > 1 and len(set(replicas)) > 1:
            continue
        first = list(itertools.accumulate(replicas, initial=0))
        ranks = tuple(tuple(range(first[s], first[s + 1])) for s in range(len(replicas))) * chunks
        chain = tuple(Channel(s, s + 1) for s in range(len(ranks) - 1))
        channels = {"chain": chain}
        if len(ranks) > 2:
            channels["skip"] = (*chain, Channel(0, len(ranks) - 1))
            channels["data"] = (*chain, Channel(0, len(ranks) - 1, False))
        variants: list[tuple[str, dict[str, Any]]] = [("", {})]
        if len(ranks) > 1:
            variants.append(("tied", {"shared": ((0, len(ranks) - 1),)}))
        if schedule in DIVIDED:
            variants = [(f"{v} m{m}".strip(), {**o, "microbatches": m}) for v, o in variants for m in (2, 4, 5, 8)]
        for (kind, joined), (variant, options) in itertools.product(channels.items(), variants):
            if schedule == "2bw" and options["microbatches"] < max(replicas):
                continue
            yield f"{replicas} {kind} {variant}", PipelineShape(ranks, joined, find(schedule), **options)


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
