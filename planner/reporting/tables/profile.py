"""The tables of a profile: its totals and its layers; and how the machine it was measured on
disturbs a plan.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Literal

from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.plan.blocks import BLOCK, FEWEST_REPEATS, kind_of, repeated_blocks
from planner.reporting.tables.device import device_words
from planner.reporting.tables.plan import options_words
from planner.reporting.tables.table import Table, named_values, table_of
from planner.units import format_bytes, format_flops, format_memory, format_seconds


def shared_host_notes(plan: Plan, profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield why workers may be slower or faster than a plan says, each with a hint."""
    if words := disturbance_words(profile):
        hint = "profile again while nothing else runs"
        yield f"the profile was taken on a busy machine ({words}): its times may be too long", hint
    device = profile.device
    measured = profile.provenance.source == "measured"
    if device.kind != "cpu" or not measured or plan.workers == 1:
        return
    if (device.processes or 1) == 1:
        yield (
            f"the profile is of one process that had its host for itself; where workers share a "
            f"host's cores and "
            f"memory, all {plan.workers} are slower than the plan says",
            f"for workers on one host, profile with: plan profile MODEL `processes={plan.workers}`",
        )


def uncut_notes(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield which operations share a layer and why, each with a hint."""
    for uncut in profile.uncut:
        what = (
            f"{uncut.operations} of {uncut.of} operations are one layer, '{uncut.layer}', and "
            f"cannot be cut"
        )
        yield f"{what}: {uncut.cause.reason}", uncut.cause.hint


Order = Literal["order", "time", "output", "weights", "saved"]
# What is worth saying of a measurement, as a share of its time. Quiet machines measure disturbances
# of 6 to 8%, and predictions that miss by less than 15% are taken to be right: a tenth is more than
# noise and can matter.
_DISTURBED = 0.1


def profile_report(profile: Profile, *, by: Order = "order", top: int | None = None) -> str:
    """Report the layers' costs, equal blocks once where all are in order, their sums, and the step
    as measured.
    """
    rows = [(1, layer) for layer in profile.layers]
    if by != "order":
        rows.sort(key=lambda row: _SIZES[by](row[1]), reverse=True)
    elif top is None:
        rows = collapsed(profile)
    shown = rows[: max(0, top)] if top is not None else rows
    parts = [named_values(_head(profile)), _layer_table(profile, shown).text()]
    if top is not None and len(shown) < len(rows):
        parts.append(f"{len(shown)} of {len(rows)} layers")
    return "\n\n".join(parts)


def disturbance_words(profile: Profile) -> str | None:
    """Say what disturbed the measurement so much that its times may be too long; None for
    nothing.
    """
    found = profile.provenance.disturbance
    if found is None:
        return None
    words = []
    if (found.waited_share or 0.0) >= _DISTURBED:
        words.append(f"steps waited {found.waited_share:.0%} of their time for a core")
    if found.drift is not None and abs(found.drift) >= _DISTURBED:
        words.append(
            f"a second measurement took {abs(found.drift):.0%} "
            f"{'longer' if found.drift > 0 else 'less'}"
        )
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
    device = profile.device
    whole = profile.whole_step
    layers = profile.layers
    accumulate_s = sum(layer.accumulate_s for layer in layers)
    own = ""
    if device.threads:
        own = f", {device.threads} thread{'s' * (device.threads > 1)}"
    if device.processes is not None:
        own += f", one of {device.processes} busy processes"
    if device.kind != "cpu" and device.memory_bytes is not None:
        own += f", {format_memory(device.memory_bytes)} usable"
    size = "unknown"
    if profile.microbatch_size is not None:
        size = f"{profile.microbatch_size} samples"
    valued = "; the sizes depend on values, and are those of example_batch with untrained weights"
    tokens = ""
    if profile.tokens_per_sample is not None:
        tokens = f", {profile.tokens_per_sample} tokens per sample"
    flops = None
    if profile.flops:
        flops = f"{format_flops(profile.flops)} per microbatch, forward and backward{tokens}"
    sums = [
        sum(getattr(layer, name) for layer in layers)
        for name in ("forward_s", "backward_s", "update_s")
    ]
    step = None
    if whole is not None:
        step = _step(whole.forward_s, whole.backward_s, whole.update_s)
    accumulation = f"{format_seconds(accumulate_s)} more per microbatch that accumulates gradients"
    return [
        ("model", profile.model),
        (
            "device",
            device_words(device, own) if device.name != "unknown" else "unknown",
        ),
        ("microbatch", size + (f" of {profile.dtype}" if profile.dtype else "")),
        ("stages run", options_words(profile)),
        ("loss", None if profile.loss is None else profile.loss.words),
        (
            "numbers",
            profile.provenance.source + ("" if profile.provenance.sizes is None else valued),
        ),
        ("sum of layers", _step(*sums)),
        ("model FLOPs", flops),
        ("measured whole", step),
        ("accumulation", accumulation if accumulate_s else None),
        ("disturbed", disturbance_words(profile)),
        *(("not cut", f"{text}; {hint}") for text, hint in uncut_notes(profile)),
        ("lengths", _lengths_words(profile)),
    ]


def _lengths_words(profile: Profile) -> str | None:
    if (lengths := profile.lengths) is None:
        return None
    ranges = zip(lengths.names, lengths.least, lengths.most, lengths.samples, strict=True)
    words = "; ".join(
        f"{name} {least} to {most}, mean {fmean(own):.1f}" for name, least, most, own in ranges
    )
    return (
        f"{words}; the numbers are those of the greatest, fitted to {len(lengths.profiled)} lengths"
    )


def _growth(profile: Profile, layer: Layer) -> str | None:
    """Say how a layer's times depend on lengths, and by how much of their mean the fit
    misses them.
    """
    if profile.lengths is None:
        return None
    rows = zip(profile.layers, profile.lengths.layers, strict=True)
    fits = next(
        fits for own, fits in rows if own.name == layer.name or fnmatchcase(own.name, layer.name)
    )
    times = fits.forward_s, fits.backward_s
    kinds = [fit.kind for fit in times]
    kind = next(kind for kind in ("quadratic", "linear", "constant") if kind in kinds)
    return f"{kind}, {max(fit.residual for fit in times):.0%} off"


def _step(*seconds: float) -> str:
    parts = zip(("forward", "backward", "update"), seconds, strict=False)
    return f"{format_seconds(sum(seconds))}: " + ", ".join(
        f"{name} {format_seconds(each)}" for name, each in parts
    )


def _layer_table(profile: Profile, rows: Sequence[tuple[int, Layer]]) -> Table:
    """Tabulate layers, each with how often it occurs."""
    total_s = sum(map(time_s, profile.layers))
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
                "in length": _growth(profile, layer),
                "output": format_bytes(output_bytes(layer)),
                "weights": format_bytes(layer.weight_bytes),
                "saved": format_bytes(layer.saved_bytes),
            }
            for count, layer in rows
        ]
    )


def collapsed(profile: Profile) -> list[tuple[int, Layer]]:
    """Return the layers in order, equal ones of repeated blocks once, with how often each occurs;
    costs are means.
    """
    keys = _keys(profile)
    often = Counter(keys)
    groups: dict[object, list[Layer]] = {}
    for place, (key, layer) in enumerate(zip(keys, profile.layers, strict=True)):
        groups.setdefault(key if often[key] >= FEWEST_REPEATS else place, []).append(layer)

    rows = []
    for key, group in groups.items():
        mean = group[0]
        if isinstance(key, tuple):
            mean = _mean_layer(str(key[0]), group)
        rows.append((len(group), mean))
    return rows


def _keys(profile: Profile) -> list[object]:
    """Return for each layer a key that is equal for equal layers of repeated blocks: its name with
    a star for the block, and its kind; for all other layers its place.
    """
    repeated = {place for block in repeated_blocks(profile) for place in block}
    keys: list[object] = []
    for place, layer in enumerate(profile.layers):
        found = BLOCK.match(layer.name)
        if place not in repeated or not found:
            keys.append(place)
            continue
        block = found[0]
        starred = block.rpartition(".")[0] + ".*" + layer.name[len(block) :]
        keys.append((starred.removeprefix("."), kind_of(layer)))
    return keys


def _mean_layer(name: str, layers: Sequence[Layer]) -> Layer:
    """Return a layer with the means of what the table shows of these."""

    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(layers)

    return replace(
        layers[0],
        name=name,
        forward_s=mean(layer.forward_s for layer in layers),
        backward_s=mean(layer.backward_s for layer in layers),
        update_s=mean(layer.update_s for layer in layers),
        accumulate_s=mean(layer.accumulate_s for layer in layers),
        weight_bytes=round(mean(layer.weight_bytes for layer in layers)),
        gradient_bytes=round(mean(layer.gradient_bytes for layer in layers)),
        saved_bytes=round(mean(layer.saved_bytes for layer in layers)),
    )
