"""What makes a profile valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProfileError
from planner.formats.profile import Profile, load_profile, save_profile
from tests.samples import layer, profile


@pytest.fixture
def sample() -> Profile:
    return profile(layer("a", output_bytes=8), layer("b", output_bytes=8), layer("c"))


def test_what_was_saved_is_loaded_with_the_same_digest(sample: Profile, tmp_path: Path) -> None:
    save_profile(sample, tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded == sample
    assert loaded.digest == sample.digest


def test_the_digest_does_not_depend_on_the_order_in_the_file_but_on_every_number(
    sample: Profile, tmp_path: Path
) -> None:
    content = json.loads(sample.model_dump_json())
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content, sort_keys=True))
    assert load_profile(path).digest == sample.digest
    content["layers"][1]["forward_s"] += 1e-9
    path.write_text(json.dumps(content))
    assert load_profile(path).digest != sample.digest


def test_what_a_profile_does_not_know_is_not_in_its_digest(sample: Profile) -> None:
    """Plans of older profiles are still theirs."""
    assert sample.digest == "623016ccfed4f2126bf5221a315130cdf9e9821c80c8ebdc36ff9795ebecc404"
    layers = tuple(each.model_copy(update={"accumulate_s": 0.25}) for each in sample.layers)
    assert sample.model_copy(update={"layers": layers}).digest != sample.digest


def set_at(content: Any, place: list[str | int], value: object) -> None:
    for step in place[:-1]:
        content = content[step]
    content[place[-1]] = value


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (["layers", 1, "forward_s"], -1.0, "layers[1].forward_s = -1.0"),
        (["layers", 1, "forward_s"], float("nan"), "layers[1].forward_s = nan"),
        (["layers", 1, "weight_bytes"], 1.5, "layers[1].weight_bytes = 1.5"),
        (["layers", 1, "colour"], "red", "layers[1].colour = 'red': unknown field"),
        (["layers", 1, "name"], "a", "layer name 'a' occurs twice"),
        (["layers"], [], "layers = []"),
        (["edges", 0, "target"], "z", "unknown layer 'z'"),
        (["edges", 0, "value"], "z", "unknown value 'z'"),
        (["edges", 1], {"source": "b", "value": "b", "target": "a"}, "goes backwards"),
        (["no_cut_after"], ["z"], "no_cut_after names the unknown layer 'z'"),
        (["microbatch_size"], 0, "microbatch_size = 0"),
        (["schema_version"], 2, "schema_version 2, this version reads 1"),
    ],
)
def test_wrong_content_is_named(
    sample: Profile, tmp_path: Path, place: list[str | int], value: object, complaint: str
) -> None:
    content = json.loads(sample.model_dump_json())
    set_at(content, place, value)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert complaint in caught.value.message
    assert "plan profile" in caught.value.hint
