"""Profiles of several kinds of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.errors import ClusterError, InputError, ProfileError
from planner.formats.cluster import Cluster, DeviceKind, Level, flat_cluster
from planner.formats.device_kinds import cluster_for, profile_of_kinds, profile_on, read_profile
from planner.formats.profile import Device, Layer, Profile, load_profile, save_profile
from tests.samples import layer, profile

FAST = profile(layer("a", output_bytes=4, weight_bytes=8), layer("b", forward_s=2.0, saved_bytes=3))


def changed(number: int, **values: object) -> Profile:
    """The profile with a layer changed."""
    layers = list(FAST.layers)
    layers[number] = layers[number].model_copy(update=values)
    return FAST.model_copy(update={"layers": tuple(layers)})


SLOW = changed(0, forward_s=5.0, workspace_bytes=7).model_copy(
    update={"device": Device(kind="cuda", name="slow", memory_bytes=100)}
)


def cluster_of(*kinds: DeviceKind) -> Cluster:
    return Cluster(
        levels=(Level(size=sum(kind.count for kind in kinds), bandwidth_bytes_per_s=1.0),),
        kinds=kinds,
    )


def test_each_kind_has_the_profile_that_was_measured_on_it(tmp_path: Path) -> None:
    both = profile_of_kinds({"fast": FAST, "slow": SLOW})
    for name, own in (("fast", FAST), ("slow", SLOW)):
        assert profile_on(both, DeviceKind(count=1, name=name)) == own
    save_profile(both, tmp_path / "both.json")
    assert load_profile(tmp_path / "both.json") == both


def test_a_speed_is_a_profile_scaled() -> None:
    seconds = ("forward_s", "backward_s", "update_s", "accumulate_s")
    halved = tuple(
        each.model_copy(update={name: getattr(each, name) / 2 for name in seconds})
        for each in FAST.layers
    )
    assert profile_on(FAST, DeviceKind(count=1, speed=2.0)).layers == halved
    scaled = profile_of_kinds({"fast": FAST, "slow": SLOW})
    assert profile_on(scaled, DeviceKind(count=1, name="fast", speed=2.0)).layers == halved


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(1, saved_bytes=4), "saved_bytes of layer 'b' is 3 for 'one' and 4 for 'two'"),
        (changed(1, name="c"), "name of layer 'b' is b for 'one' and c for 'two'"),
        (profile(*FAST.layers[:1]), "number of layers is 2 for 'one' and 1 for 'two'"),
        (
            FAST.model_copy(update={"microbatch_size": 8}),
            "microbatch_size is 4 for 'one' and 8 for 'two'",
        ),
        (
            changed(0, outputs=()),
            "outputs of layer 'a' is [('a', 4, 4)] for 'one' and [] for 'two'",
        ),
    ],
)
def test_the_first_difference_between_the_layers_is_named(other: Profile, message: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(message)):
        profile_of_kinds({"one": FAST, "two": other})


def test_a_cluster_gets_what_the_profile_says_of_its_kinds() -> None:
    measured = SLOW.model_copy(
        update={"provenance": SLOW.provenance.model_copy(update={"source": "measured"})}
    )
    both = profile_of_kinds({"fast": FAST, "slow": measured})
    fast, slow = cluster_for(
        both, cluster_of(DeviceKind(count=2, name="fast"), DeviceKind(count=1, name="slow"))
    ).kinds
    assert (fast.device, fast.memory_bytes) == (None, None)  # estimated, and a CPU
    assert (slow.device, slow.memory_bytes) == ("slow", 95)  # plans fill no more
    with pytest.raises(ClusterError, match=r"several kinds of devices \(fast, slow\)"):
        cluster_for(both, flat_cluster(2, 1.0))
    with pytest.raises(
        ClusterError, match="2 GPUs of a kind 'medium', and the profile is of fast, slow"
    ):
        cluster_for(both, cluster_of(DeviceKind(count=2, name="medium")))


def test_profiles_are_read_by_the_names_of_their_kinds(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    save_profile(FAST, one)
    save_profile(SLOW, two)
    assert read_profile(str(one)) == FAST
    assert read_profile(f"fast={one},slow={two}") == profile_of_kinds({"fast": FAST, "slow": SLOW})
    with pytest.raises(InputError, match="does not name each kind"):
        read_profile(f"fast={one},{two}")
    with pytest.raises(ProfileError, match="there is no file"):
        read_profile(f"{one},{two}")


def test_every_time_of_a_layer_depends_on_its_kind() -> None:
    """A time that a layer gets in the future must not stay that of the first kind."""
    assert {name for name in Layer.model_fields if name.endswith("_s")} - {
        "forward_spread_s",
        "backward_spread_s",
        "forward_thread_s",
        "backward_thread_s",
        "accumulate_thread_s",
    } == {"forward_s", "backward_s", "update_s", "accumulate_s"}
