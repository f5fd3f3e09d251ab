"""Digests of the instructions that schedules give each worker."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

from planner.schedule.registry import find
from planner.schedule.schedule import Channel, PipelineShape, stream

REPLICAS = (
    (1,),
    (2,),
    (1, 1),
    (2, 1),
    (1, 2),
    (2, 2),
    (3, 1, 2),
    (2, 1, 1),
    (1, 1, 1, 1),
    (2, 2, 2),
)
NUMBERS_OF_MICROBATCHES = (2, 4, 5, 8)


def stream_digests(schedule: str) -> dict[str, str]:
    """Return a digest of every worker's instructions, for all shapes that the schedule has."""
    digests = {}
    for label, shape in shapes(schedule):
        for stage, ranks in enumerate(shape.ranks):
            for rank in ranks:
                if shape.first_stages[rank] == stage:
                    text = "\n".join(map(repr, stream(shape, stage, rank, 5)))
                    digests[f"{label} rank {rank}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return digests


def shapes(name: str) -> Iterator[tuple[str, PipelineShape]]:
    """Yield shapes with their names: flat and replicated, with a skip, with tied weights,
    divided.
    """
    schedule, chunks = find(name), 2 if name == "interleaved" else 1
    for replicas in REPLICAS:
        if chunks > 1 and len(set(replicas)) > 1:
            continue
        ranks = _ranks(replicas, chunks)
        for (kind, channels), (variant, options) in itertools.product(
            _channels(len(ranks)), _variants(name, ranks)
        ):
            if name == "2bw" and options["microbatches"] < max(replicas):
                continue
            yield (
                f"{replicas} {kind} {variant}",
                PipelineShape(ranks, channels, schedule, **options),
            )


def _ranks(replicas: tuple[int, ...], chunks: int) -> tuple[tuple[int, ...], ...]:
    first = list(itertools.accumulate(replicas, initial=0))
    return (
        tuple(tuple(range(first[stage], first[stage + 1])) for stage in range(len(replicas)))
        * chunks
    )


def _channels(stages: int) -> list[tuple[str, tuple[Channel, ...]]]:
    chain = tuple(Channel(stage, stage + 1) for stage in range(stages - 1))
    channels = [("chain", chain)]
    if stages > 2:
        channels.append(("skip", (*chain, Channel(0, stages - 1))))
        channels.append(("data", (*chain, Channel(0, stages - 1, False))))
    return channels


def _variants(name: str, ranks: tuple[tuple[int, ...], ...]) -> list[tuple[str, dict[str, Any]]]:
    variants: list[tuple[str, dict[str, Any]]] = [("", {})]
    if len(ranks) > 1:
        variants.append(("tied", {"shared": ((0, len(ranks) - 1),)}))
    if not find(name).divides:
        return variants
    return [
        (f"{label} m{microbatches}".strip(), {**options, "microbatches": microbatches})
        for label, options in variants
        for microbatches in NUMBERS_OF_MICROBATCHES
    ]
