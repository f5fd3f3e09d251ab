"""`plan solve`, `plan compare` and `plan explain` from outside: tables, JSON, complaints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner.formats.profile import save_profile
from tests.cli.in_process import plan
from tests.samples import layer, profile

ROOT = Path(__file__).resolve().parents[2]
MODEL = profile(
    layer("a", 0.2, 0.4, output_bytes=1000, saved_bytes=10**9),
    layer("b", 0.1, 0.2, weight_bytes=10**8, saved_bytes=10**9),
)
CLUSTER = ("--gpus", "3", "--bandwidth", "1Gbps")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_profile(MODEL, tmp_path / "profile.json")
    return tmp_path


def test_compare(folder: Path) -> None:
    assert plan("solve", *CLUSTER, cwd=folder).returncode == 0
    compared = plan("compare", cwd=folder)
    assert compared.returncode == 0, compared.stderr
    assert "chosen plan" in compared.stdout
    assert "data parallel" in compared.stdout
    rows = json.loads(plan("compare", "--plan", "plan.json", "--json", cwd=folder).stdout)["rows"]
    assert [row["name"] for row in rows][:2] == ["chosen plan", "data parallel"]


def test_compressed_messages_are_an_axis_of_the_cluster(folder: Path) -> None:
    """The cluster file may say it, and the option says otherwise."""
    arguments = ("solve", *CLUSTER, "--compress", "int8", "--json")
    cluster = json.loads(plan(*arguments, cwd=folder).stdout)["cluster"]
    (folder / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
    for verb in (("show",), ("compare",), ("price", "--stages", "a", "--cluster", "cluster.json")):
        assert "sent as int8" in plan(*verb, cwd=folder).stdout, verb
    plain = plan("solve", "--cluster", "cluster.json", "--compress", "none", cwd=folder)
    assert "cluster" in plain.stdout
    assert "sent as" not in plain.stdout
    priced = plan(
        "price", "--stages", "a", "--cluster", "cluster.json", "--sequence-parallel", cwd=folder
    )
    assert priced.returncode == 2
    assert "--sequence-parallel is for groups of ranks, of which the profile" in priced.stderr
    wrong = plan("solve", *CLUSTER, "--compress", "int4", cwd=folder)
    assert wrong.returncode == 2
    assert "int4" in wrong.stderr


@pytest.mark.parametrize(
    "arguments", [("solve", *CLUSTER), ("solve", *CLUSTER, "--memory", "1kB", "--json")]
)
def test_a_reader_that_leaves_ends_it_quietly(folder: Path, arguments: tuple[str, ...]) -> None:
    verb = [sys.executable, "-m", "planner", *arguments]
    with subprocess.Popen(
        verb, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        said = running.stderr.read()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_explain(folder: Path) -> None:
    assert plan("solve", *CLUSTER, cwd=folder).returncode == 0
    explained = plan("explain", cwd=folder)
    assert explained.returncode == 0, explained.stderr
    assert "limited by the computation of stage 0" in explained.stdout
    assert (
        json.loads(plan("explain", "--plan", "plan.json", "--json", cwd=folder).stdout)["config"]
        == "2-1"
    )
    assert plan("price", "--stages", "a", *CLUSTER, cwd=folder).returncode == 0
    assert "You chose the stages" in plan("explain", cwd=folder).stdout


def test_a_profile_without_a_batch_size_knows_no_samples(tmp_path: Path) -> None:
    layers = [
        layer(f"node{i}", 0.001 * i, 0.001 * i, output_bytes=1000, weight_bytes=1_000_000)
        for i in (1, 2, 3)
    ]
    save_profile(
        profile(*layers).model_copy(update={"microbatch_size": None}), tmp_path / "profile.json"
    )
    assert plan("solve", "--gpus", "2", "--bandwidth", "1Gbps", cwd=tmp_path).returncode == 0
    for verb in ("compare", "explain"):
        done = plan(verb, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "samples/s" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("solve",), 2, "the cluster has no bandwidth"),
        (("compare", "--plan", "none.json"), 2, "there is no file 'none.json'"),
        (("solve", *CLUSTER, "--memory", "1GB"), 3, "no plan fits 3 GPUs of 1 GB"),
        (("solve", "--gpus", "x", "--bandwidth", "1Gbps"), 2, "'x'"),
        (("solve", "--gpus", "0", "--bandwidth", "1Gbps"), 2, "0"),
        (("solve", "--gpus", "2", "--bandwidth", "2Gb"), 2, "bandwidth '2Gb' is not a rate"),
        (("solve", "--bandwidth", "1Gbps"), 2, "the cluster has no number of GPUs"),
    ],
)
def test_wrong_input_is_one_sentence_a_hint_and_a_code(
    folder: Path, arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    done = plan(*arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    # On a busy machine a search tells its progress before it fails.
    error, hint = (line for line in done.stderr.splitlines() if not line.endswith(" left"))
    assert error.startswith("error: ")
    assert complaint in error
    assert hint.startswith("hint: ")
    assert done.stdout == ""


def test_a_plan_of_another_profile_is_refused(folder: Path) -> None:
    assert plan("solve", *CLUSTER, cwd=folder).returncode == 0
    save_profile(MODEL.model_copy(update={"model": "other"}), folder / "profile.json")
    for verb in ("compare", "explain"):
        done = plan(verb, "--plan", "plan.json", cwd=folder)
        assert done.returncode == 2
        assert "another profile" in done.stderr


def test_price_takes_stages_as_flags(folder: Path) -> None:
    options = (
        "--stages",
        "a",
        "--replicas",
        "2,1",
        "--recompute",
        "0:1",
        "--shard-optimizer",
        "all",
    )
    flags = plan("price", *options, *CLUSTER, "--json", cwd=folder)
    assert flags.returncode == 0, flags.stderr
    first = planner.OwnStage(layers=("a",), replicas=2, recompute=1, sharded=True)
    own = planner.OwnPlan(stages=(first, planner.OwnStage(layers=("b",))))
    cluster = planner.flat_cluster(3, CLUSTER[CLUSTER.index("--bandwidth") + 1])
    assert planner.price(MODEL, cluster, own) == planner.Plan.model_validate_json(flags.stdout)
    assert "2-1 on 3 GPUs" in plan("show", cwd=folder).stdout
    small = plan("price", *options, *CLUSTER, "--memory", "1GB", cwd=folder)
    assert small.returncode == 3
    assert "the plan does not fit: stage 1 needs 1.2 GB" in small.stderr
    assert "predicted" in small.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --stages"),
        (
            ("--stages", "a", "--replicas", "1,1,1"),
            "does not say how many replicas each of 2 stages has",
        ),
        (("--stages", "a", "--replicas", "x"), "--replicas x does not say"),
        (("--stages", "a", "--replicas", "0"), "or one for each, 1 or more: --replicas 2,1"),
        (
            ("--stages", "a", "--recompute", "2"),
            "--recompute 2 names none of the stages, which count from 0 to 1",
        ),
        (
            ("--stages", "a", "--recompute", "0:3"),
            "3 blocks are to recompute in the stage from 'a'",
        ),
        (
            ("--stages", "a", "--recompute", "0:x"),
            "--recompute 0:x does not end with a number of blocks",
        ),
        (
            ("--stages", "a", "--shard-optimizer", "all:4"),
            "--shard-optimizer all:4 does not end with 1, 2 or 3",
        ),
        (("--stages", "1,0"), "has a stage without blocks"),
        (("--stages", "x"), "has no layer 'x'"),
    ],
)
def test_stages_that_cannot_be_priced(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused = plan("price", *arguments, *CLUSTER, cwd=folder)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert message in refused.stderr
    assert not (folder / "plan.json").exists()


def test_a_minibatch_and_rules_of_stages_are_flags(folder: Path) -> None:
    solving = (*CLUSTER, "--schedule", "1f1b-flush", "--recompute", "never", "--minibatch")
    solved = plan("solve", *solving, "32", cwd=folder)
    assert solved.returncode == 0, solved.stderr
    assert "8 microbatches" in solved.stdout
    refused = plan("solve", *solving, "33", cwd=folder)
    assert refused.returncode == 2
    assert "--minibatch 33 is no multiple of the 4 samples" in refused.stderr


def test_where_nothing_fits_under_the_default_schedule_another_one_is_the_answer(
    folder: Path,
) -> None:
    """Under 1f1b the first of two stages has two versions of its weights."""
    model = profile(layer("a", output_bytes=1, weight_bytes=100), layer("b", weight_bytes=100))
    save_profile(model, folder / "profile.json")
    tight = ("solve", "--gpus", "2", "--bandwidth", "1Gbps", "--memory", "210B")
    found = plan(*tight, cwd=folder)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Nothing fits under 1f1b, so this plan is under 1f1b-flush. ")
    assert planner.load_plan(folder / "plan.json").schedule.name == "1f1b-flush"

    named = plan(*tight, "--schedule", "1f1b", cwd=folder)
    assert named.returncode == 3
    assert "hint: use --schedule 1f1b-flush --microbatches 8, under which 1-1 fits" in named.stderr
