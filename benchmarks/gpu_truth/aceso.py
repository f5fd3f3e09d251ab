"""Aceso's and Megatron's measured iterations on L4, A10G and A100, by Aceso's operators.

Logs say how many operators of a stage run again, not which. They follow from the search that Aceso
publishes (microsoft/SuperScaler, branch Aceso, search/aceso_cost_model.py, `check_recompute`): of
all kinds of operators it takes the one whose activations are largest in the stage, together with
the operator after each, until the stage fits; the last kind only as often as needed, from the
stage's beginning. Neighbours that run again are one group, and layer norms at the beginning of a
layer begin a new one (runtime/megatron/model/flex_model.py, `forward`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from itertools import chain as chained
from typing import Any, NamedTuple

from benchmarks.gpu_truth.aceso_links import PER_SERVER, Rates
from benchmarks.gpu_truth.by_layers import Parts, Reduces, chain, divided, parts_of, summed
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    Prediction,
    Row,
    anchors,
    device,
    half_precision,
    memory_of,
    price,
)
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Layer, Profile
from planner.profiler.estimated.devices import DeviceSpec

_DEVICES = {"L4-24GB": "l4", "A10G-24GB": "a10g", "A100-SXM4-40GB": "a100"}


@dataclass(frozen=True)
class Kind:
    """A kind of Aceso's operators.

    Attributes:
        captured: operation of our layer that it is, or is a part of.
        seconds, saved: its share of that operation's times and saved bytes.
        entering: share of its saved bytes that are its input, made by the operator before it.
        activations: what Aceso counts for it: hidden states, and matrices of attention.
        sends: where a stage ends with it, hidden states that each rank sends, and those that the
            ranks divide.
        weights: whether it has those of the operation.
    """

    captured: int
    seconds: float = 1.0
    saved: float = 1.0
    entering: float = 1.0
    activations: tuple[float, float] = (0.0, 0.0)
    sends: tuple[float, float] = (1.0, 0.0)
    weights: bool = True

    def kept(self, attention: float) -> float:
        """Return what Aceso counts, in hidden states."""
        return self.activations[0] + attention * self.activations[1]


# Softmax keeps its result of two bytes and dropout its mask of one. The first product has the
# norm's result beside the GELU's input, which is four times as large. What enters a residual sum is
# sent along (runtime/megatron/model/flex_ops.py); matrices of attention would be, too, but no run
# cuts there.
_LAYER: Mapping[str, Kind] = {
    "norm1": Kind(0, activations=(1, 0), sends=(2, 0)),
    "qkv": Kind(1, activations=(3, 0), sends=(1, 3)),
    "score": Kind(2, activations=(0, 1)),
    "softmax": Kind(3, 0.5, 2 / 3, 0, (0, 1)),
    "dropout": Kind(3, 0.5, 1 / 3, 0, (0, 1.5)),
    "context": Kind(4, activations=(1, 0), sends=(1, 1)),
    "dense": Kind(5, activations=(1, 0), sends=(2, 0)),
    "dropout1": Kind(6, entering=0, activations=(1.5, 0)),
    "norm2": Kind(7, activations=(1, 0), sends=(2, 0)),
    "gemm1": Kind(8, 0.95, 1 / 5, activations=(4, 0), sends=(1, 4)),
    "gelu": Kind(8, 0.05, 4 / 5, activations=(4, 0), sends=(1, 4), weights=False),
    "gemm2": Kind(9, activations=(1, 0), sends=(2, 0)),
    "dropout2": Kind(10, entering=0, activations=(1.5, 0)),
}
_FIRST = "norm1"
_OUTER = ("embedding", "norm", "head")  # never run again


# Where Megatron's layers all-reduce: the results of the second products of each pair, and the
# gradients of the first ones' inputs.
_FORWARD = ("embedding", "dense", "gemm2")
_BACKWARD = ("qkv", "gemm1", "head")


def rows() -> Iterator[Row]:
    """Yield all runs."""
    for run in anchors("mist-aceso-runs.json"):
        yield _row(run)


def _row(run: Mapping[str, Any]) -> Row:
    model, stages, gpu = run["model"], run["stages"], _DEVICES[run["gpu"]]
    job = f"GPT {model['size']}, {run['total_gpus']} {run['gpu']}, batch {run['global_batch']}"
    plan = f"{len(stages)} stages, microbatch {run['micro_batch']}"
    ranks = sorted({_ranks(stage) for stage in stages} - {1})
    if ranks:
        plan += f", tp {','.join(map(str, ranks))}"
    measured_s = run["measured_iteration_ms"] / 1e3
    return Row(f"aceso {gpu}", job, plan, measured_s, partial(_predict, run), spec=device(gpu))


def _ranks(stage: Mapping[str, Any]) -> int:
    """Return over how many ranks a stage divides its operators: no run has several numbers in a
    stage.
    """
    ((ranks, _),) = stage["tp_runs"]
    return int(ranks)


def _predict(run: Mapping[str, Any], spec: DeviceSpec) -> Prediction:
    model, stages, micro = run["model"], run["stages"], run["micro_batch"]
    hidden = model["hidden"]
    gpt = Gpt(
        "gpt", model["layers"], hidden, model["heads"], 4 * hidden, 50432, model["seq"], dropout=0.1
    )
    own, ranks = list(_own_operators(gpt, stages)), [_ranks(stage) for stage in stages]
    degrees = sorted({1, *ranks})
    whole, *parts = (
        _profile(
            gpt, own, parts_of(replace(gpt, tensor=degree), micro, half_precision(), spec), ranks
        )
        for degree in degrees
    )
    profile = divided(whole, dict(zip(degrees[1:], parts, strict=True)), _reduces(own))
    names = (layer.name for layer in profile.layers)
    planned = [
        OwnStage(
            layers=tuple(islice(names, stage["ops"])),
            replicas=stage["dp_runs"][0][0],
            tensor=degree,
        )
        for stage, degree in zip(stages, ranks, strict=True)
    ]
    # No rank computes while it sends or receives (runtime/megatron/p2p_communication.py), or while
    # gradients are all-reduced. Plans with groups of several sizes are priced on one level, so its
    # rate is that inside a server, and what takes longer counts as more bytes.
    rates, hidden_bytes = Rates.of(_DEVICES[run["gpu"]]), whole.layers[0].outputs[0].output_bytes
    gpus = [stage.replicas * stage.tensor for stage in planned]
    inside = rates.message_bytes_per_s(hidden_bytes, inside=True)
    reduce = rates.reduce_bytes_per_s(max(2, *ranks), hidden_bytes)
    cluster = flat_cluster(
        sum(gpus), inside, overlap=False, all_reduce_bandwidth_bytes_per_s=reduce
    )
    microbatches = run["global_batch"] // micro
    priced = price(profile, cluster, planned, microbatches)
    memory = memory_of(priced, [stage.get("peak_allocated_mb") for stage in stages])
    if len(planned) > 1:
        cuts = list(_cuts(own, ranks, gpus))
        priced = price(_sending(profile, cuts, rates, inside), cluster, planned, microbatches)
    return Prediction(priced.predicted.seconds_per_minibatch, memory)


class _Cut(NamedTuple):
    """Where a stage ends: after which operator, and what crosses it in hidden states."""

    layer: int
    whole: float
    divided: float
    ranks: tuple[int, int]  # of both stages
    inside: bool  # of a server


def _cuts(stages: Sequence[_Own], ranks: Sequence[int], gpus: Sequence[int]) -> Iterator[_Cut]:
    ends, devices = accumulate(len(own.names) for own in stages), accumulate(gpus)
    for number, (end, device_end) in enumerate(
        islice(zip(ends, devices, strict=True), len(stages) - 1)
    ):
        last = stages[number].names[-1]
        whole, parts = _LAYER[last].sends if last in _LAYER else (1.0, 0.0)
        yield _Cut(
            end - 1, whole, parts, (ranks[number], ranks[number + 1]), device_end % PER_SERVER > 0
        )


def _sending(profile: Profile, cuts: Sequence[_Cut], rates: Rates, inside: float) -> Profile:
    """Return the profile whose values at cuts have so many bytes that a link of this rate takes as
    long for them.
    """
    hidden_bytes = profile.layers[0].outputs[0].output_bytes
    layers = list(profile.layers)
    for cut in cuts:
        whole, parts, (here, there) = (
            cut.whole * hidden_bytes,
            cut.divided * hidden_bytes,
            cut.ranks,
        )
        forward_s = rates.message_s(whole, parts, (here, there), inside=cut.inside)
        back_s = rates.message_s(whole, parts, (there, here), inside=cut.inside)
        # To a group of more ranks each rank is taken to send several copies
        # (`planner.simulator.pipeline_costs`).
        sent = {
            "output_bytes": round(forward_s * inside / math.ceil(there / here)),
            "gradient_bytes": round(back_s * inside / math.ceil(here / there)),
        }
        (value,) = layers[cut.layer].outputs
        layers[cut.layer] = layers[cut.layer].model_copy(
            update={"outputs": (value.model_copy(update=sent),)}
        )
    return profile.model_copy(update={"layers": tuple(layers)})


@dataclass(frozen=True)
class _Own:
    """A stage's operators, and the groups of them that run again in the backward."""

    names: Sequence[str]
    groups: Sequence[range]


def _own_operators(gpt: Gpt, stages: Sequence[Mapping[str, Any]]) -> Iterator[_Own]:
    names = iter(["embedding", *list(_LAYER) * gpt.layers, "norm", "head"])
    for stage in stages:
        own = list(islice(names, stage["ops"]))
        again = recomputing(own, stage["recomputed_ops"], gpt.heads * gpt.seq / gpt.hidden)
        yield _Own(own, groups_of(own, again))


def _profile(gpt: Gpt, stages: Sequence[_Own], costs: Parts, ranks: Sequence[int]) -> Profile:
    """Return the model's operators as the stages run them: some again in their backward."""
    operators = {name: _part(costs.operators[kind.captured], kind) for name, kind in _LAYER.items()}
    norm, *classifier = costs.head_operators
    operators |= {"embedding": costs.embedding, "norm": norm, "head": summed("head", classifier)}
    found, sends = list[Layer](), list[float]()
    for own, degree, following in zip(stages, ranks, (*ranks[1:], 1), strict=True):
        layers = [operators[name] for name in own.names]
        for group in own.groups:
            layers[group.start : group.stop] = _again(
                own.names[group.start], layers[group.start : group.stop], costs
            )
        for name, layer in zip(own.names, layers, strict=True):
            found.append(layer.model_copy(update={"name": f"{name}-{len(found)}"}))
            whole, parts = _LAYER[name].sends if name in _LAYER else (1.0, 0.0)
            sends.append(whole + parts / min(degree, following))
    return chain(gpt.name, costs, found, sends)


def _reduces(stages: Sequence[_Own]) -> Reduces:
    """Return how many hidden states each operator all-reduces, forward and backward."""
    forward = [[int(name in _FORWARD) for name in own.names] for own in stages]
    backward = [[int(name in _BACKWARD) for name in own.names] for own in stages]
    for own, ahead, back in zip(stages, forward, backward, strict=True):
        for number in chained.from_iterable(own.groups):
            back[number] += ahead[number]
    return list(chained.from_iterable(forward)), list(chained.from_iterable(backward))


def _part(layer: Layer, kind: Kind) -> Layer:
    update: dict[str, Any] = {
        "forward_s": kind.seconds * layer.forward_s,
        "backward_s": kind.seconds * layer.backward_s,
        "saved_bytes": round(kind.saved * layer.saved_bytes),
    }
    if not kind.weights:
        update |= {"update_s": 0.0, "weight_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
    return layer.model_copy(update=update)


def recomputing(names: Sequence[str], wanted: int, attention: float) -> set[int]:
    """Return which of a stage's operators run again, given how many do.

    Args:
        names: of the operators, in order.
        wanted: how many run again.
        attention: a matrix of attention, in hidden states.
    """
    places: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        places.setdefault(name, []).append(number)
    found: set[int] = set()
    taken = {_FIRST, *_OUTER}
    while len(found) < wanted and (left := [name for name in places if name not in taken]):
        name = max(left, key=lambda name: len(places[name]) * _LAYER[name].kept(attention))
        after = places[name][0] + 1
        taken |= {name, names[after]} if after < len(names) else {name}
        for number in places[name]:
            if len(found) < wanted:
                found |= {number, number + 1} & set(range(len(names)))
    # Where all kinds are taken, Aceso's configuration says that everything runs again.
    found |= set(
        islice(
            (number for number in range(len(names)) if number not in found),
            max(0, wanted - len(found)),
        )
    )
    return found


def groups_of(names: Sequence[str], recomputed: set[int]) -> list[range]:
    """Return the runs of operators that run again together."""
    groups: list[range] = []
    for number in sorted(recomputed):
        if groups and groups[-1].stop == number and names[number] != _FIRST:
            groups[-1] = range(groups[-1].start, number + 1)
        else:
            groups.append(range(number, number + 1))
    return groups


def _again(first: str, layers: Sequence[Layer], costs: Parts) -> Iterator[Layer]:
    """Yield the operators of one group: they keep what enters it, and run before the group's
    backward.
    """
    kind = _LAYER.get(first)
    entering = (
        layers[0].saved_bytes if kind is None else round(kind.entering * layers[0].saved_bytes)
    )
    if kind is not None and not kind.entering:
        # softmax has kept what enters its dropout
        entering = costs.boundary_bytes if first != "dropout" else 0
    there = 0  # of the group, in its backward
    for number, layer in enumerate(layers):
        there += layer.saved_bytes - (entering if number == 0 else 0)
        yield layer.model_copy(
            update={
                "backward_s": layer.backward_s + layer.forward_s,
                "saved_bytes": entering if number == 0 else 0,
                "workspace_bytes": layer.workspace_bytes + max(0, there),
            }
        )
