"""A GPT of 4 billion parameters with large vocabularies, on 8 A100 in one pipeline: five ways to
place its embedding and head, with the times of each stage.

By stage times nothing is estimated, and schedules alone are judged. Where all stages share the
head, its passes are part of the stages' forwards, which is where the authors' schedules put most of
them. By estimate those ways are priced that leave the head whole: on the last stage with as many
layers as the others have, or with fewer.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import median

from benchmarks.gpu_truth.by_layers import parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    ANCHORS,
    Prediction,
    Row,
    device,
    half_precision,
    price,
    without_overlap,
)
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value
from planner.profiler.estimated.devices import DeviceSpec

_HALF = 2  # bytes
_US = 1e-6
_FORWARD = ("paper_stage_forward_us_inferred", "paper_stage_input_forward_us_inferred")
_SHARED_HEAD = "paper_stage_output_pass_us_inferred"
_BACKWARD = ("paper_stage_backward_us_inferred", "paper_stage_input_backward_us_inferred")
_WHOLE_HEAD = ("baseline", "redis")

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the rows, priced with the times of their stages."""
    for record in _records():
        yield Row(*_named("vocab-parallel", record), predicted=_predict(record))


def rows_by_estimate() -> Iterator[Row]:
    """Yield the rows whose head is whole, estimated."""
    for record in _records():
        if record["method"] in _WHOLE_HEAD:
            named = _named("vocab-parallel by estimate", record)
            yield Row(*named, partial(_estimate, record), spec=device("a100-80gb"))


def _records() -> Iterator[Record]:
    with (ANCHORS / "vocab-parallel.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _named(source: str, record: Record) -> tuple[str, str, str, float]:
    measured_s = float(record["paper_iteration_seconds_inferred"])
    return source, record["job"], record["method"], measured_s


def _estimate(record: Record, spec: DeviceSpec) -> Prediction:
    blocks = [int(count) for count in record["layers_per_stage_inferred"].split()]
    gpt = Gpt(
        record["model"],
        sum(blocks),
        int(record["hidden_size"]),
        int(record["attention_heads"]),
        int(record["ffn_size"]),
        int(record["vocabulary"]),
        int(record["sequence_length"]),
        flash=True,
    )
    costs = parts_of(gpt, int(record["micro_batch"]), half_precision(), spec)
    profile = transformer(gpt.name, costs, [costs.layer] * sum(blocks))
    bounds = list(accumulate(blocks, initial=0))
    names = [layer.name for layer in profile.layers]
    stages = [
        OwnStage(layers=tuple(names[first + (first > 0) : last + 1]))
        for first, last in pairwise([*bounds[:-1], len(names) - 1])
    ]
    return Prediction(
        without_overlap(price(profile, _cluster(stages), stages, int(record["microbatches"])))
    )


def _cluster(stages: Sequence[OwnStage]) -> Cluster:
    return flat_cluster(len(stages), "nvlink3")


def _predict(record: Record) -> Prediction:
    profile = _profile(record)
    stages = [OwnStage(layers=(layer.name,)) for layer in profile.layers]
    plan = price(profile, _cluster(stages), stages, int(record["microbatches"]))
    return Prediction(without_overlap(plan))


def _profile(record: Record) -> Profile:
    forward_s = _summed(record, (*_FORWARD, _SHARED_HEAD))
    backward_s = _summed(record, _BACKWARD)
    tokens = int(record["micro_batch"]) * int(record["sequence_length"])
    sent = _HALF * tokens * int(record["hidden_size"])
    last = len(forward_s) - 1
    layers = []
    for number, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True)):
        name = f"stage{number}"
        value = Value(name=name, output_bytes=sent, gradient_bytes=sent)
        layers.append(
            Layer(
                name=name,
                op="stage",
                forward_s=forward,
                backward_s=backward,
                update_s=0.0,
                outputs=() if number == last else (value,),
            )
        )
    edges = [Edge(source=a.name, value=a.name, target=b.name) for a, b in pairwise(layers)]
    return Profile(
        model=record["model"],
        device=Device(kind="cuda", name="NVIDIA A100 SXM 80 GB"),
        microbatch_size=int(record["micro_batch"]),
        layers=tuple(layers),
        edges=tuple(edges),
        provenance=Provenance(tool="VocabularyParallelism", source="imported"),
    )


def _summed(record: Record, columns: Sequence[str]) -> list[float]:
    """Return the seconds of each stage, summed over the columns that a method has."""
    times = [[_US * float(each) for each in record[name].split()] for name in columns]
    return [sum(own) for own in zip(*filter(None, times), strict=True)]


def ratio_errors(judged: Sequence[Row]) -> list[float]:
    """Return how far the ratio of a method's time to that of its job's first method is off, for all
    other methods.
    """
    errors = []
    for job in dict.fromkeys(row.job for row in judged):
        own = [row for row in judged if row.job == job]
        first, *others = own
        for row in others:
            assert row.predicted is not None
            assert first.predicted is not None
            predicted = row.predicted.seconds / first.predicted.seconds
            errors.append(predicted / (row.measured_s / first.measured_s) - 1)
    return errors


def main() -> None:
    """Print each row, and how far ratios of methods are off."""
    for make in (rows, rows_by_estimate):
        judged = [row.now() for row in make()]
        for row in judged:
            assert row.error is not None
            print(f"{row.job} {row.plan}: {row.measured_s:.3f} s, {row.error:+.1%}")
        off = [abs(row.error) for row in judged if row.error is not None]
        ratios = [abs(error) for error in ratio_errors(judged)]
        print(
            f"{judged[0].source}: {len(judged)} rows, median {median(off):.1%}, ratios of methods "
            f"median {median(ratios):.1%}, worst {max(ratios):.1%}\n"
        )


if __name__ == "__main__":
    main()
