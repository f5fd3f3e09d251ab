"""`plan profile --estimate` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.in_process import plan
from tests.cli.test_profile import MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_an_estimate_is_made_shown_and_solved_within_the_devices_memory(folder: Path) -> None:
    made = plan(
        "profile",
        "model.py",
        "--estimate",
        "--device",
        "titan-x",
        "--batch-size",
        "8",
        "--json",
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr
    assert made.stderr.startswith("estimating model.py for ")
    assert made.stderr.endswith("written to profile.json\n")
    content = json.loads(made.stdout)
    assert content["provenance"]["source"] == "estimated"
    shown = plan("show", "profile.json", cwd=folder).stdout
    assert "estimated" in shown
    assert "Titan X" in shown
    solved = plan("solve", "--gpus", "2", "--bandwidth", "10Gbps", "--json", cwd=folder)
    usable = 12103 * 2**20  # what a process can use of 12 GiB
    assert json.loads(solved.stdout)["cluster"]["memory_bytes"] == round(0.95 * usable)
    assert "note: plans fill 95% of the 11.8 GiB that the profiled GPU has" in solved.stderr
    assert "hint: --memory gives another limit" in solved.stderr


def test_a_device_of_ones_own_with_master_weights(folder: Path) -> None:
    device = {
        "schema_version": 1,
        "name": "My GPU",
        "peak_flops_per_s": {"float32": 3e13, "float16": 12e13},
        "bandwidth_bytes_per_s": 3e11,
        "memory_bytes": 24 * 10**9,
        "processors": 58,
        "clock": 0.5,
    }
    (folder / "my.json").write_text(json.dumps(device))
    arguments = ("--estimate", "--device-file", "my.json", "--dtype", "fp16", "--master-weights")
    made = plan("profile", "model.py", *arguments, "--json", cwd=folder)
    assert made.returncode == 0, made.stderr
    content = json.loads(made.stdout)
    assert content["device"]["name"] == "My GPU"
    assert content["device"]["memory_bytes"] == 24 * 10**9
    assert content["dtype"] == "float16"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.py", "--estimate", "--device", "v100"), "there is no model file 'none.py'"),
        (("model.py", "--estimate", "--device", "tpu"), "no estimate for device 'tpu'"),
        (("model.py", "--estimate", "--dtype", "int8"), "'int8' is not a data type"),
        (
            ("model.py", "--estimate", "--device", "p100", "--dtype", "bf16"),
            "no bfloat16 arithmetic",
        ),
        (
            ("model.py", "--estimate", "--threads", "2"),
            "--deterministic are for measurements",
        ),
        (("model.py", "--estimate", "--batch-size", "0"), "--batch-size 0"),
        (("model.py", "--estimate", "--device-file", "none.json"), "none.json"),
        (("model.py", "--device-file", "my.json"), "--device-file is for estimates"),
        (("model.py", "--master-weights"), "--dtype float32 needs no master weights"),
        (
            ("model.py", "--estimate", "--master-weights"),
            "master weights in float32 belong to weights in half",
        ),
        (
            ("model.py", "--estimate", "--device", "a100", "--device-file", "my.json"),
            "an estimate is for one device",
        ),
        (("model.py", "--estimate", "--device-file", "none.json"), "there is no file 'none.json'"),
    ],
)
def test_wrong_input(folder: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = plan("profile", *arguments, cwd=folder)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "profile.json").exists()
