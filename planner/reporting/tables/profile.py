"""The tables of a profile: its totals and its layers; and how the machine it was measured on disturbs a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal

from planner.formats.plan import Plan
from planner.formats.profile import Layer, LossMean, Profile
from planner.plan.blocks import FEWEST_REPEATS, kind_of, repeated_blocks
from planner.reporting.tables.plan import options_words
from planner.reporting.tables.stages import block_of
from planner.reporting.tables.table import Table, named_values, table_of
from planner.units import format_bytes, format_flops, format_memory, format_seconds

CORES_NOT_MODELLED = (
    "the workers compute on all cores of their host, which also move the messages: the prediction counts the time of "
    "the messages, and not what else this may cost, such as waiting for a core, which takes up to a fifth of the speed "
    "where microbatches compute for a few milliseconds only"
)


def shared_host_notes(plan: Plan, profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield why workers may be slower or faster than a plan says, each with a hint, or ""."""
    if words := disturbance_words(profile):
        hint = "profile again while nothing else runs"
        yield f"the profile was taken on a busy machine ({words}): its times may be too long", hint
    device, measured = profile.device, profile.provenance.source == "measured"
    if device.kind != "cpu" or not measured or plan.workers == 1:
        return
    if (device.processes or 1) == 1:
        yield (
            f"the profile is of one process that had its host for itself; where workers share a host's cores and "
            f"memory, all {plan.workers} are slower than the plan says",
            f"for workers on one host, profile with: plan profile MODEL `processes={plan.workers}`",
        )
    elif plan.cluster.overlap:
        yield (
            f"the profile is of {device.processes} workers that share a host, and the plan takes messages to need "
            "none of its cores",
            "where workers compute on all of them, give `overlap=False`, or measure the links: plan profile `links`",
        )
    else:
        yield CORES_NOT_MODELLED, ""


Order = Literal["order", "time", "output", "weights", "saved"]
# What is worth saying of a measurement, as shares of its time and as cores. Quiet machines measure disturbances of 6 to
# 8%, and predictions that miss by less than 15% are taken to be right: a tenth is more than noise and can matter.
_DISTURBED, _OTHERS_CORES = 0.1, 0.5


def profile_report(profile: Profile, *, by: Order = "order", top: int | None = None) -> str:
    """Report the layers' costs, their sums, and the whole step as it was measured.

    Args:
        by: "order" for execution order, or what to sort by, largest first.
        top: number of layers to show; None for all. All in execution order show equal adjacent blocks once.
    """
    rows = [(1, layer) for layer in profile.layers]
    if by != "order":
        rows.sort(key=lambda row: _SIZES[by](row[1]), reverse=True)
    elif top is None:
        rows = collapsed(profile)
    shown = rows[: max(0, top)] if top is not None else rows
    parts = [named_values(_head(profile)), _layer_table(shown, sum(map(time_s, profile.layers))).text()]
    if top is not None and len(shown) < len(rows):
        parts.append(f"{len(shown)} of {len(rows)} layers")
    return "\n\n".join(parts)


def _loss_words(loss: LossMean) -> str:
    """Say what a loss is a mean over."""
    if loss.over == "labels":
        first = ", each sample's first one left out" if loss.shifted else ""
        return f"mean over the labels that are not {loss.ignored}{first}"
    return {
        "samples": "mean over samples",
        "loss_weight": "mean over what loss_weight(target) counts",
        "sum": "sum over samples",
        "batch": "of the whole batch: not a weighted mean of the losses of its parts",
    }[loss.over]


def disturbance_words(profile: Profile) -> str | None:
    """Say what disturbed the measurement so much that its times may be too long; None for nothing."""
    found = profile.provenance.disturbance
    if found is None:
        return None
    words = []
    if (found.others_cores or 0.0) >= _OTHERS_CORES:
        words.append(f"other processes used {found.others_cores:.1f} cores")
    if (found.waited_share or 0.0) >= _DISTURBED:
        words.append(f"steps waited {found.waited_share:.0%} of their time for a core")
    if found.drift is not None and abs(found.drift) >= _DISTURBED:
        words.append(f"a second measurement took {abs(found.drift):.0%} {'longer' if found.drift > 0 else 'less'}")
    return "; ".join(words) or None


def time_s(layer: Layer) -> float:
    """Sum a layer's forward, backward and update."""
    return layer.forward_s + layer.backward_s + layer.update_s


def output_bytes(layer: Layer) -> int:
    """Sum the layer's own outputs that a cut after it would send."""
    return sum(value.output_bytes for value in layer.outputs)


_SIZES: dict[str, Callable[[Layer], float]] = {
    "time": time_s,
    "output": output_bytes,
    "weights": lambda layer: layer.weight_bytes,
    "saved": lambda layer: layer.saved_bytes,
}


def _head(profile: Profile) -> list[tuple[str, str | None]]:
    device, whole, compiled, layers = profile.device, profile.whole_step, profile.compiled, profile.layers
    accumulate_s = sum(layer.accumulate_s for layer in layers)
    own = f", {device.threads} thread{'s' * (device.threads > 1)}" if device.threads else ""
    if device.processes is not None:
        own += f", one of {device.processes} busy processes"
    if device.kind != "cpu" and device.memory_bytes is not None:
        own += f", {format_memory(device.memory_bytes)} usable"
    size = "unknown" if profile.microbatch_size is None else f"{profile.microbatch_size} samples"
    valued = "; the sizes depend on values, and are those of example_batch with untrained weights"
    tokens = "" if profile.tokens_per_sample is None else f", {profile.tokens_per_sample} tokens per sample"
    flops = f"{format_flops(profile.flops)} per microbatch, forward and backward{tokens}" if profile.flops else None
    sums = [sum(getattr(layer, name) for layer in layers) for name in ("forward_s", "backward_s", "update_s")]
    step = uncompiled = parts = None
    if whole is not None:
        step = _step(whole.forward_s, whole.backward_s, whole.update_s)
    if compiled is not None:  # the separately compiled runs of layers, before scaling to the whole step
        parts = f"{len(compiled.runs)}, {_step(compiled.runs_forward_s, compiled.runs_backward_s)}"
        uncompiled = _step(compiled.uncompiled_forward_s, compiled.uncompiled_backward_s)
    accumulation = f"{format_seconds(accumulate_s)} more per microbatch that accumulates gradients"
    return [
        ("model", profile.model),
        ("device", f"{device.name} ({device.kind}{own})" if device.name != "unknown" else "unknown"),
        ("microbatch", size + (f" of {profile.dtype}" if profile.dtype else "")),
        ("stages run", options_words(profile)),
        ("loss", None if profile.loss is None else _loss_words(profile.loss)),
        ("numbers", profile.provenance.source + ("" if profile.provenance.sizes is None else valued)),
        ("sum of layers", _step(*sums)),
        ("model FLOPs", flops),
        ("measured whole", step),
        ("accumulation", accumulation if accumulate_s else None),
        ("compiled parts", parts),
        ("uncompiled", uncompiled),
        ("disturbed", disturbance_words(profile)),
    ]


def _step(*seconds: float) -> str:
    parts = zip(("forward", "backward", "update"), seconds, strict=False)
    return f"{format_seconds(sum(seconds))}: " + ", ".join(f"{name} {format_seconds(each)}" for name, each in parts)


def _layer_table(rows: Sequence[tuple[int, Layer]], total_s: float) -> Table:
    """Tabulate layers, each with how often it occurs."""
    accumulates = any(layer.accumulate_s for _, layer in rows)
    return table_of(
        [
            {
                "layer": layer.name if count == 1 else f"{count} x {layer.name}",
                "op": layer.op,
                "forward": format_seconds(layer.forward_s),
                "backward": format_seconds(layer.backward_s),
                "accumulation": format_seconds(layer.accumulate_s) if accumulates else None,
                "update": format_seconds(layer.update_s),
                "share": f"{count * time_s(layer) / total_s:.1%}" if total_s else "",
                "output": format_bytes(output_bytes(layer)),
                "weights": format_bytes(layer.weight_bytes),
                "saved": format_bytes(layer.saved_bytes),
            }
            for count, layer in rows
        ]
    )


SUMMED = ("forward_s", "backward_s", "update_s", "accumulate_s", "weight_bytes", "gradient_bytes", "saved_bytes")


def collapsed(profile: Profile) -> list[tuple[int, Layer]]:
    """Return the layers in order, those of adjacent equal blocks once, with how often each occurs.

    Costs of a layer that stands for several are their means.
    """
    layers = profile.layers
    blocks = [block for block in repeated_blocks(profile) if block_of(layers[block.start].name)]
    rows: list[tuple[int, Layer]] = []
    end = 0

    def alike(numbered: tuple[int, range]) -> tuple[int, object]:
        """Return what adjacent equal blocks share: where the run begins as far as each tells, and their layers."""
        number, block = numbered
        return block.start - number * len(block), tuple(map(kind_of, layers[block.start : block.stop]))

    for _, numbered in groupby(enumerate(blocks), alike):
        run = [block for _, block in numbered]
        if len(run) < FEWEST_REPEATS:
            continue
        rows += [(1, layer) for layer in layers[end : run[0].start]]
        rows += [
            (len(run), _mean_layer([layers[block.start + place] for block in run])) for place in range(len(run[0]))
        ]
        end = run[-1].stop
    return rows + [(1, layer) for layer in layers[end:]]


def _mean_layer(layers: Sequence[Layer]) -> Layer:
    """Return a layer that stands for equal ones: its name has a star for the block's number, its costs are means."""
    first, last = block_of(layers[0].name), block_of(layers[-1].name)
    stem = first[: len(first) - len(first.rsplit(".", 1)[-1])]
    name = f"{stem}*{layers[0].name[len(first) :]}" if last.startswith(stem) else layers[0].name
    means = {each: sum(getattr(layer, each) for layer in layers) / len(layers) for each in SUMMED}
    whole = {each: round(value) if each.endswith("_bytes") else value for each, value in means.items()}
    return layers[0].model_copy(update={"name": name, **whole})
