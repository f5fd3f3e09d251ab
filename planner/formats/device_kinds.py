"""Profiles of one model on several kinds of devices, which share layers and bytes, but not times
and workspaces.

Also reads the profile that a command line names: one, or one for each kind.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.errors import ClusterError, InputError, ProfileError
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.files import read_json, replace
from planner.formats.names import PLANNED
from planner.formats.profile import (
    KIND_COLUMNS,
    DegreeCosts,
    Device,
    KindTimes,
    Profile,
    load_profile,
)

# What must be equal, of profiles and of their layers.
_OF_PROFILES = (
    "dtype",
    "autocast",
    "master_weights",
    "base_bits",
    "products",
    "stack",
    "memory_format",
    "deterministic",
    "microbatch_size",
    "tokens_per_sample",
)
_OF_LAYERS = (
    "name",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "saved_bytes",
    "parameters",
)


def profile_of_kinds(profiles: Mapping[str, Profile]) -> Profile:
    """Return one profile of the model on these kinds of devices; raise ProfileError where their
    layers differ.
    """
    (first, base), *others = profiles.items()
    for name, profile in profiles.items():
        if profile.kinds:
            raise ProfileError(
                f"the profile of '{name}' has several kinds itself",
                hint="give one profile per kind",
            )

    for name, profile in others:
        for (what, one), (_, other) in zip(_facts(base), _facts(profile), strict=False):
            if one != other:
                raise ProfileError(
                    f"the profiles are not of the same layers: {what} is {one} for '{first}' and "
                    f"{other} for '{name}'",
                    hint="profile the same model file with the same options on each kind of device",
                )

    return replace(base, kinds=tuple(_times(name, profile) for name, profile in profiles.items()))


def read_profile(text: str) -> Profile:
    """Read FILE, or NAME=FILE,NAME=FILE of kinds of devices as one profile."""
    if "=" not in text or Path(text).exists():
        return load_profile(text)
    parts = [part.rpartition("=") for part in text.split(",")]
    names = [name for name, _, _ in parts]
    if "" in names or len(set(names)) < len(names):
        raise InputError(
            f"`profile={text}` does not name each kind of GPU once",
            hint="write NAME=FILE,NAME=FILE, as in a100=a.json",
        )

    return profile_of_kinds({name: load_profile(path) for name, _, path in parts})


def is_profile(path: Path) -> bool:
    with suppress(OSError, ValueError):  # loading it will say what is wrong
        content: object = read_json(path)
        return isinstance(content, dict) and "layers" in content and "stages" not in content
    return False


def profile_on(profile: Profile, kind: DeviceKind) -> Profile:
    """Return the profile on devices of one kind; raise ClusterError for a name that the profile
    does not know.
    """
    times = _times_of(profile, kind)
    layers = [
        replace(
            layer,
            forward_s=layer.forward_s / kind.speed,
            backward_s=layer.backward_s / kind.speed,
            update_s=layer.update_s / kind.speed,
            accumulate_s=layer.accumulate_s / kind.speed,
        )
        for layer in times.applied_to(profile.layers)
    ]
    tensor = times.tensor and tuple(_at_speed(costs, kind.speed) for costs in times.tensor)
    return replace(profile, layers=tuple(layers), device=times.device, kinds=None, tensor=tensor)


def _at_speed(costs: DegreeCosts, speed: float) -> DegreeCosts:
    """Return the costs of divided layers on devices that are so many times as fast."""
    if speed == 1:
        return costs

    def faster(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(each / speed for each in seconds)

    return replace(
        costs,
        forward_s=faster(costs.forward_s),
        backward_s=faster(costs.backward_s),
        update_s=faster(costs.update_s),
        accumulate_s=faster(costs.accumulate_s),
        by_tokens=costs.by_tokens and _at_speed(costs.by_tokens, speed),
    )


def cluster_for(profile: Profile, cluster: Cluster) -> Cluster:
    """Return the cluster with what the profile says of its kinds; raise ClusterError if they do not
    match.
    """
    if profile.kinds and not cluster.kinds:
        names = ", ".join(kind.name for kind in profile.kinds)
        raise ClusterError(
            f"the profile is of several kinds of devices ({names}), and the cluster does not say "
            f"which GPUs are which",
            hint=f"give `kinds={','.join(f'{kind.name}=N' for kind in profile.kinds)}`, or name "
            f"them in cluster.json",
        )

    if not profile.kinds:
        return cluster
    kinds = []
    for kind in cluster.kinds:
        times = _times_of(profile, kind)
        if times.source == "measured" and kind.speed == 1:
            kind = replace(kind, device=times.device.name)
        if times.device.shares_of is not None:
            kind = replace(kind, shares_of=times.device.shares_of)
        limited = kind.memory_bytes is not None or cluster.memory_bytes is not None
        if not limited and times.device.kind != "cpu":
            kind = replace(kind, memory_bytes=planned_bytes(times.device))
        kinds.append(kind)

    return replace(cluster, kinds=tuple(kinds))


def planned_bytes(device: Device) -> int | None:
    """Return how much of a profiled GPU's memory plans fill at most, where no limit is given; None
    where it is unknown.

    A CPU's memory is the whole machine's, which says little about one worker, so it is no limit.
    """
    if device.kind == "cpu" or device.memory_bytes is None:
        return None
    return round(PLANNED * device.memory_bytes)


def _times_of(profile: Profile, kind: DeviceKind) -> KindTimes:
    if not profile.kinds:
        return _times(kind.name or "", profile)
    found = next((times for times in profile.kinds if times.name == kind.name), None)
    if found is None:
        names = ", ".join(times.name for times in profile.kinds)
        called = "without a name"
        if kind.name is not None:
            called = f"'{kind.name}'"
        raise ClusterError(
            f"the cluster has {kind.count} GPUs of a kind {called}, and the profile is of {names}",
            hint="name each of the cluster's `kinds` as in `profile=NAME=FILE`",
        )

    return found


def _times(name: str, profile: Profile) -> KindTimes:
    columns: dict[str, Any] = {
        each: tuple(getattr(layer, each) for layer in profile.layers) for each in KIND_COLUMNS
    }
    shares = tuple(layer.weight_share for layer in profile.layers)
    return KindTimes(
        name=name,
        device=profile.device,
        source=profile.provenance.source,
        tensor=profile.tensor,
        weight_shares=shares if any(share is not None for share in shares) else None,
        **columns,
    )


def _facts(profile: Profile) -> Iterator[tuple[str, object]]:
    for what in _OF_PROFILES:
        yield what, getattr(profile, what)
    yield "number of layers", len(profile.layers)
    for layer in profile.layers:
        outputs = [
            (value.name, value.output_bytes, value.gradient_bytes) for value in layer.outputs
        ]
        for what, value in (
            *((each, getattr(layer, each)) for each in _OF_LAYERS),
            ("outputs", outputs),
        ):
            yield f"{what} of layer '{layer.name}'", value

    yield "number of edges", len(profile.edges)
    yield from (
        ("an edge", f"{edge.source} -> {edge.target} of {edge.value}") for edge in profile.edges
    )
    yield "no_cut_after", profile.no_cut_after
