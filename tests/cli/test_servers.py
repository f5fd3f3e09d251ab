"""Clusters as people count them: servers, and GPUs in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.api.servers import Servers, count_gpus
from planner.errors import ClusterError, PlannerError
from planner.formats.profile import save_profile
from planner.options.verbs import FitOptions
from tests.cli.in_process import plan
from tests.samples import layer, profile

MODEL = profile(
    layer("a", 0.2, 0.4, output_bytes=1000),
    layer("b", 0.1, 0.2, weight_bytes=10**8),
)
PRICE = ("price", "--stages", "a", "--json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    return tmp_path


def levels(folder: Path, *arguments: str) -> list[tuple[int, float]]:
    """Return the sizes and the rates of the cluster that the arguments describe."""
    priced = plan(*PRICE, *arguments, cwd=folder)
    assert priced.returncode == 0, priced.stderr
    return [
        (level["size"], level["bandwidth_bytes_per_s"])
        for level in json.loads(priced.stdout)["cluster"]["levels"]
    ]


@pytest.mark.parametrize(
    "counted",
    [
        ("--servers", "2", "--gpus-per-server", "4"),
        ("--servers", "2", "--gpus", "8"),
        ("--gpus-per-server", "4", "--gpus", "8"),
        ("--topology", "4x2"),
    ],
    ids=" ".join,
)
def test_two_servers_of_four_gpus(folder: Path, counted: tuple[str, ...]) -> None:
    assert levels(folder, *counted, "--bandwidth", "16GB/s,10Gbps") == [(4, 16e9), (2, 1.25e9)]


@pytest.mark.parametrize(
    "counted",
    [
        ("--servers", "1", "--gpus-per-server", "4"),
        ("--servers", "4", "--gpus-per-server", "1"),
        ("--gpus-per-server", "4"),
        ("--gpus", "4"),
    ],
    ids=" ".join,
)
def test_one_level_has_one_rate(folder: Path, counted: tuple[str, ...]) -> None:
    assert levels(folder, *counted, "--bandwidth", "10Gbps") == [(4, 1.25e9)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--servers", "2", "--gpus", "9", "--bandwidth", "16GB/s,10Gbps"),
            "9 GPUs do not split evenly over 2 servers\nhint: give --servers as one of 1, 3, 9",
        ),
        (
            ("--gpus-per-server", "4", "--gpus", "9", "--bandwidth", "16GB/s,10Gbps"),
            "9 GPUs are not servers of 4 GPUs each",
        ),
        (
            (
                "--servers",
                "2",
                "--gpus-per-server",
                "4",
                "--gpus",
                "9",
                "--bandwidth",
                "16GB/s,10Gbps",
            ),
            "2 servers of 4 GPUs are 8 GPUs, not --gpus 9\nhint: leave out --gpus",
        ),
        (
            ("--servers", "2", "--gpus-per-server", "4", "--bandwidth", "10Gbps"),
            "--bandwidth has 1 rate for 2 servers\nhint: give one for GPUs in one server, or for "
            "servers of one GPU",
        ),
        (
            ("--servers", "2", "--bandwidth", "10Gbps"),
            "the cluster has no number of GPUs\nhint: give --servers 2 and --gpus-per-server 4",
        ),
        (
            ("--gpus", "8", "--bandwidth", "16GB/s,10Gbps"),
            "--bandwidth has 2 values for one level\nhint: say how many servers there are: "
            "--servers 2",
        ),
        (
            ("--topology", "4x2", "--servers", "2", "--bandwidth", "16GB/s,10Gbps"),
            "--servers cannot be combined with --topology",
        ),
        (
            ("--gpus", "8", "--own-links", "--bandwidth", "10Gbps"),
            "--own-links is for several servers of several GPUs",
        ),
    ],
)
def test_clusters_that_contradict_themselves(
    folder: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    refused = plan(*PRICE, *arguments, cwd=folder)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_python_counts_servers_too() -> None:
    counted = planner.cluster(MODEL, servers=2, gpus_per_server=4, bandwidth="pcie4,10Gbps")
    assert counted == planner.hierarchical_cluster((4, 2), ("pcie4", "10Gbps"))
    assert counted == planner.cluster(servers=2, gpus_per_server=4, bandwidth="pcie4,10Gbps")


def test_servers_that_do_not_have_the_gpus_are_refused_by_fit() -> None:
    with pytest.raises(ClusterError, match="2 servers of 2 GPUs are 4 GPUs, not `gpus=8`"):
        Servers.of(8, FitOptions(servers=2, gpus_per_server=2))


@pytest.mark.parametrize("given", [{"topology": "4x2"}, {"topology": (4, 2)}])
def test_fit_reads_a_topology_as_servers(given: dict[str, Any]) -> None:
    gpus, options = count_gpus(None, FitOptions(**given))
    assert gpus == 8
    servers = Servers.of(gpus, options)
    assert (servers.count, servers.per_server) == (2, 4)
    assert count_gpus(None, FitOptions(servers=2, gpus_per_server=4)) == (
        8,
        FitOptions(servers=2, gpus_per_server=4),
    )


@pytest.mark.parametrize(
    ("gpus", "given", "message"),
    [
        (None, {"topology": "4x2x3"}, "`topology=4x2x3` has 3 levels"),
        (9, {"topology": "4x2"}, "2 servers of 4 GPUs are 8 GPUs, not `gpus=9`"),
        (None, {"topology": "4x2", "servers": 2}, "`servers` cannot be combined with `topology`"),
        (None, {"topology": "4xtwo"}, "'two' is not a number of GPUs or servers"),
    ],
)
def test_a_topology_that_fit_cannot_take(
    gpus: int | None,
    given: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(PlannerError, match=message):
        count_gpus(gpus, FitOptions(**given))
