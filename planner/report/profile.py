"""A profile for people."""

from __future__ import annotations

from tabulate import tabulate

from planner.profile_file import Layer, Profile
from planner.units import format_bytes, format_seconds


def profile_report(profile: Profile) -> str:
    """Every layer's costs, and their sums against the step measured whole."""
    return "\n\n".join((_head(profile), _layer_table(profile)))


def _head(profile: Profile) -> str:
    device = profile.device
    threads = f", {device.threads} thread{'s' * (device.threads > 1)}" if device.threads else ""
    size = "unknown" if profile.microbatch_size is None else f"{profile.microbatch_size} samples"
    sums = [sum(getattr(layer, name) for layer in profile.layers) for name in ("forward_s", "backward_s", "update_s")]
    lines = [
        ("model", profile.model),
        ("device", f"{device.name} ({device.kind}{threads})" if device.name != "unknown" else "unknown"),
        ("microbatch", size + (f" of {profile.dtype}" if profile.dtype else "")),
        ("numbers", profile.provenance.source),
        ("sum of layers", _step(*sums)),
    ]
    if (whole := profile.whole_step) is not None:
        lines.append(("measured whole", _step(whole.forward_s, whole.backward_s, whole.update_s)))
    return tabulate(lines, tablefmt="plain", disable_numparse=True)


def _step(forward_s: float, backward_s: float, update_s: float) -> str:
    parts = (("forward", forward_s), ("backward", backward_s), ("update", update_s))
    total = format_seconds(forward_s + backward_s + update_s)
    return f"{total}: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in parts)


def _layer_table(profile: Profile) -> str:
    headers = ["layer", "op", "forward", "backward", "update", "output", "weights", "saved"]
    rows = [_row(layer) for layer in profile.layers]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _row(layer: Layer) -> list[str]:
    return [
        layer.name,
        layer.op,
        format_seconds(layer.forward_s),
        format_seconds(layer.backward_s),
        format_seconds(layer.update_s),
        format_bytes(sum(value.output_bytes for value in layer.outputs)),
        format_bytes(layer.weight_bytes),
        format_bytes(layer.saved_bytes),
    ]
