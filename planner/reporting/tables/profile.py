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
from planner.formats.profile import Device, Layer, Profile, Provenance, WholeStep
from planner.plan.blocks import BLOCK, FEWEST_REPEATS, kind_of, repeated_blocks
from planner.reporting.tables.device import device_words
from planner.reporting.tables.plan import options_words
from planner.reporting.tables.table import Table, named_values, optional_text, table_of
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

    shown = rows
    if top is not None:
        shown = rows[: max(0, top)]
    parts = [named_values(_head(profile)), _layer_table(profile, shown).text()]
    if len(shown) < len(rows):
        parts.append(f"{len(shown)} of {len(rows)} layers")
    return "\n\n".join(parts)


def disturbance_words(profile: Profile) -> str | None:
    """Say what disturbed the measurement so much that its times may be too long; None for
    nothing.
    """
    disturbance = profile.provenance.disturbance
    if disturbance is None:
        return None

    words = []
    waited = disturbance.waited_share or 0.0
    if waited >= _DISTURBED:
        words.append(f"steps waited {waited:.0%} of their time for a core")

    drift = disturbance.drift or 0.0
    if drift >= _DISTURBED:
        words.append(f"a second measurement took {drift:.0%} longer")
    if drift <= -_DISTURBED:
        words.append(f"a second measurement took {-drift:.0%} less")
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
    return [
        ("model", profile.model),
        ("device", _device_words(profile.device)),
        ("microbatch", _microbatch_words(profile)),
        ("stages run", options_words(profile)),
        ("loss", optional_text(profile.loss, lambda loss: loss.words)),
        ("numbers", _source_words(profile.provenance)),
        ("sum of layers", _sums_words(profile.layers)),
        ("model FLOPs", _flops_words(profile)),
        ("measured whole", optional_text(profile.whole_step, _whole_words)),
        ("accumulation", _accumulation_words(profile.layers)),
        ("disturbed", disturbance_words(profile)),
        *(("not cut", f"{text}; {hint}") for text, hint in uncut_notes(profile)),
        ("lengths", _lengths_words(profile)),
    ]


def _device_words(device: Device) -> str:
    """Name the device, with what the measurement had of it."""
    if device.name == "unknown":
        return "unknown"

    had = ""
    if device.threads == 1:
        had += ", 1 thread"
    elif device.threads:
        had += f", {device.threads} threads"

    if device.processes is not None:
        had += f", one of {device.processes} busy processes"
    if device.kind != "cpu" and device.memory_bytes is not None:
        had += f", {format_memory(device.memory_bytes)} usable"
    return device_words(device, had)


def _microbatch_words(profile: Profile) -> str:
    """Write "16 samples of float32"."""
    size = "unknown"
    if profile.microbatch_size is not None:
        size = f"{profile.microbatch_size} samples"
    if profile.dtype:
        size += f" of {profile.dtype}"
    return size


def _source_words(provenance: Provenance) -> str:
    """Say whether numbers are measured or estimated, and whether sizes hold for one batch alone."""
    if provenance.sizes is None:
        return provenance.source
    return (
        f"{provenance.source}; the sizes depend on values, and are those of example_batch with "
        f"untrained weights"
    )


def _flops_words(profile: Profile) -> str | None:
    if not profile.flops:
        return None
    words = f"{format_flops(profile.flops)} per microbatch, forward and backward"
    if profile.tokens_per_sample is not None:
        words += f", {profile.tokens_per_sample} tokens per sample"
    return words


def _accumulation_words(layers: Sequence[Layer]) -> str | None:
    accumulate_s = sum(layer.accumulate_s for layer in layers)
    if not accumulate_s:
        return None
    return f"{format_seconds(accumulate_s)} more per microbatch that accumulates gradients"


def _sums_words(layers: Sequence[Layer]) -> str:
    return _step(
        sum(layer.forward_s for layer in layers),
        sum(layer.backward_s for layer in layers),
        sum(layer.update_s for layer in layers),
    )


def _whole_words(step: WholeStep) -> str:
    return _step(step.forward_s, step.backward_s, step.update_s)


def _lengths_words(profile: Profile) -> str | None:
    lengths = profile.lengths
    if lengths is None:
        return None

    words = []
    for name, least, most, samples in zip(
        lengths.names, lengths.least, lengths.most, lengths.samples, strict=True
    ):
        words.append(f"{name} {least} to {most}, mean {fmean(samples):.1f}")

    fitted = f"fitted to {len(lengths.profiled)} lengths"
    return f"{'; '.join(words)}; the numbers are those of the greatest, {fitted}"


def _growth(profile: Profile, layer: Layer) -> str | None:
    """Say how a layer's times depend on lengths, and by how much of their mean the fit
    misses them.
    """
    if profile.lengths is None:
        return None

    fits = next(
        fits
        for measured, fits in zip(profile.layers, profile.lengths.layers, strict=True)
        if measured.name == layer.name or fnmatchcase(measured.name, layer.name)
    )
    kinds = (fits.forward_s.kind, fits.backward_s.kind)
    kind = next(kind for kind in ("quadratic", "linear", "constant") if kind in kinds)
    residual = max(fits.forward_s.residual, fits.backward_s.residual)
    return f"{kind}, {residual:.0%} off"


def _step(forward_s: float, backward_s: float, update_s: float) -> str:
    parts = (
        f"forward {format_seconds(forward_s)}",
        f"backward {format_seconds(backward_s)}",
        f"update {format_seconds(update_s)}",
    )
    return f"{format_seconds(forward_s + backward_s + update_s)}: {', '.join(parts)}"


def _layer_table(profile: Profile, rows: Sequence[tuple[int, Layer]]) -> Table:
    """Tabulate layers, each with how often it occurs."""
    accumulates = any(layer.accumulate_s for _, layer in rows)
    cells = []
    for count, layer in rows:
        name = layer.name
        if count > 1:
            name = f"{count} x {layer.name}"

        accumulation = None
        if accumulates:
            accumulation = format_seconds(layer.accumulate_s)

        cells.append(
            {
                "layer": name,
                "op": layer.op,
                "forward": format_seconds(layer.forward_s),
                "backward": format_seconds(layer.backward_s),
                "accumulation": accumulation,
                "update": format_seconds(layer.update_s),
                "share": _share_words(profile, count * time_s(layer)),
                "in length": _growth(profile, layer),
                "output": format_bytes(output_bytes(layer)),
                "weights": format_bytes(layer.weight_bytes),
                "saved": format_bytes(layer.saved_bytes),
            }
        )

    return table_of(cells)


def _share_words(profile: Profile, seconds: float) -> str:
    """Write the share that seconds have of the time of all layers."""
    total_s = sum(map(time_s, profile.layers))
    if not total_s:
        return ""
    return f"{seconds / total_s:.1%}"


def collapsed(profile: Profile) -> list[tuple[int, Layer]]:
    """Return the layers in order, equal ones of repeated blocks once, with how often each occurs;
    costs are means.
    """
    rows = []
    for name, layers in _groups(profile):
        if name is None:
            rows += [(1, layer) for layer in layers]
        else:
            rows.append((len(layers), _mean_layer(name, layers)))
    return rows


def _groups(profile: Profile) -> list[tuple[str | None, list[Layer]]]:
    """Return equal layers of repeated blocks together, by their name; all others alone, without
    one.
    """
    keys = _keys(profile)
    often = Counter(keys)
    groups: dict[object, list[Layer]] = {}
    names: dict[object, str | None] = {}
    for place, (key, layer) in enumerate(zip(keys, profile.layers, strict=True)):
        group: object = place
        if often[key] >= FEWEST_REPEATS:
            group = key
        groups.setdefault(group, []).append(layer)
        names[group] = None
        if isinstance(group, tuple):
            names[group] = str(group[0])

    return [(names[group], layers) for group, layers in groups.items()]


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
