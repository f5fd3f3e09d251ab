"""`plan fit` from outside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.formats.cluster import DeviceKind
from planner.formats.device_kinds import profile_on
from planner.formats.fit import TrainerRun
from planner.reporting.tables.trainer_run import trainer_run_report
from tests.cli.in_process import plan
from tests.cli.test_profile import MODEL


def test_a_model_file_gets_an_answer_and_the_files_for_other_verbs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    asked = ("--gpus", "2", "--gpu", "v100", "--dtype", "float32", "--compress", "int8")
    fitted = plan("fit", "model.py", *asked, "-o", ".", cwd=tmp_path)  # a folder that is there
    assert fitted.returncode == 0, fitted.stderr
    for text in (
        "fits",
        "of the 16.1 GB that plans may fill (95% of its memory)",
        "split",
        "data parallel",
        "estimated",
        "sent as int8",
    ):
        assert text in fitted.stdout
    assert plan("show", cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"] == "1f1b-flush"


def test_a_builder_of_a_file_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL.replace("def build_model", "def small"))
    fitted = plan("fit", "mine.py:small", "--gpus", "2", "-o", "there", cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    assert "there holds profile.json and plan.json. Next:" in fitted.stderr
    assert "  plan train ../mine.py:small " in fitted.stderr


def test_what_does_not_fit_ends_with_3_and_says_so_as_json(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    fitted = plan("fit", "model.py", "--gpus", "1", "--memory", "1kB", "--json", cwd=tmp_path)
    assert fitted.returncode == 3
    answer = json.loads(fitted.stdout)
    assert answer["asked"]["plan"] is None
    assert answer["asked"]["why_not"]
    assert not (tmp_path / "plan.json").exists()


def test_an_answer_without_a_plan_keeps_the_files_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "profile.json").write_text("an earlier one's")
    (tmp_path / "plan.json").write_text("an earlier one's")
    fitted = plan("fit", "model.py", "--gpus", "1", "--memory", "1kB", cwd=tmp_path)
    assert fitted.returncode == 3
    assert "keeps the profile.json and plan.json of an earlier answer" in caplog.text
    for name in ("profile.json", "plan.json"):
        assert (tmp_path / name).read_text() == "an earlier one's"


def test_fewer_gpus_than_fill_the_servers_are_all_in_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    fitted = plan("fit", "model.py", "--gpus", "18", "--servers", "3", "--json", cwd=tmp_path)
    rows = json.loads(fitted.stdout)["others"]
    sizes = {
        row["gpus"]: [level["size"] for level in row["plan"]["cluster"]["levels"]] for row in rows
    }
    assert sizes == {9: [3, 3], 4: [4], 2: [2], 1: [1]}


@pytest.mark.parametrize("links", [(), ("--bandwidth", "nvlink3")], ids=["usual", "given"])
def test_more_gpus_than_were_asked_about_are_in_several_servers(
    links: tuple[str, ...], tmp_path: Path
) -> None:
    """Where a model does not fit the GPUs of one server, more of them have the usual links between
    servers.
    """
    wide = "nn.Linear(8, 2048), *[nn.Linear(2048, 2048) for _ in range(8)]"
    text = MODEL.replace("nn.Linear(8, 16)", wide).replace("nn.Linear(16, 4)", "nn.Linear(2048, 4)")
    (tmp_path / "model.py").write_text(text)
    fitted = plan(
        "fit", "model.py", "--gpus", "1", "--memory", "2.3GB", "--json", *links, cwd=tmp_path
    )
    answer = json.loads(fitted.stdout)
    assert answer["asked"]["plan"] is None
    found = {
        row["gpus"]: row["plan"]["cluster"]["levels"]
        for row in answer["others"]
        if row["plan"] is not None
    }
    rates = {
        gpus: [(level["size"], level["bandwidth_bytes_per_s"]) for level in levels]
        for gpus, levels in found.items()
    }
    assert rates
    assert rates == {gpus: [(1, 228e9), (gpus, 12.5e9)] for gpus in rates}


def test_servers_nobody_counted_have_equally_many_gpus(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    fitted = plan("fit", "model.py", "--gpus", "9", "--batch-size", "3", "--json", cwd=tmp_path)
    found = json.loads(fitted.stdout)["asked"]["plan"]
    assert [level["size"] for level in found["cluster"]["levels"]] == [3, 3]
    assert (found["microbatch_size"], found["microbatches"]) == (3, 4 * 9 * 5)


def test_servers_of_one_gpu_have_one_link(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    fitted = plan(
        "fit",
        "model.py",
        "--gpus",
        "4",
        "--servers",
        "4",
        "--bandwidth",
        "1Gbps",
        "--json",
        cwd=tmp_path,
    )
    levels = json.loads(fitted.stdout)["asked"]["plan"]["cluster"]["levels"]
    assert [(level["size"], level["bandwidth_bytes_per_s"]) for level in levels] == [(4, 125e6)]


def test_links_are_those_of_a_file(tmp_path: Path) -> None:
    """Measured ones keep all that was measured of them, for fewer GPUs, too; a level that the file
    has not is as usual.
    """
    (tmp_path / "model.py").write_text(MODEL)
    measured = planner.hierarchical_cluster((2, 2), (3e9, 4e8), latencies_s=(1e-5, 2e-5))
    planner.save_cluster(measured, tmp_path / "cluster.json")
    asked = ("fit", "model.py", "--gpu", "l4", "--json", "--cluster", "cluster.json")
    answer = json.loads(plan(*asked, cwd=tmp_path).stdout)

    def links(row: dict[str, Any]) -> list[tuple[int, float, float]]:
        return [
            (level["size"], level["bandwidth_bytes_per_s"], level["latency_s"])
            for level in row["plan"]["cluster"]["levels"]
        ]

    inside, between = (3e9, 1e-5), (4e8, 2e-5)
    assert links(answer["asked"]) == [(2, *inside), (2, *between)]
    assert [links(row) for row in answer["others"]] == [[(2, *inside)], [(1, *inside)]]

    for more, words in (
        (("--gpus", "8"), "--cluster cluster.json has 4 GPUs, not --gpus 8"),
        (("--servers", "2"), "--servers"),
        (("--bandwidth", "1Gbps"), "--bandwidth"),
    ):
        refused = plan(*asked, *more, cwd=tmp_path)
        assert refused.returncode == 2
        assert words in refused.stderr


TRANSFORMER = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(100, 64)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x).transpose(1, 2)

def build_model():
    return Model()

def example_batch(size):
    return torch.randint(100, (size, 8)), torch.randint(100, (size, 8))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def shown_of(answer: dict[str, Any]) -> str:
    """What `plan fit` prints of a trainer's run, from its JSON: that takes no second search."""
    return trainer_run_report(TrainerRun.model_validate(answer["trainer_run"]))


def test_a_string_of_megatrons_is_priced_and_bettered(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TRANSFORMER)
    string = (
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32 "
        "--overlap-grad-reduce"
    )
    asked = ("fit", "model.py", "--gpus", "4", "--megatron", string)
    fitted = plan(*asked, "--json", cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    answer = json.loads(fitted.stdout)
    shown = shown_of(answer)
    assert shown.startswith("as given    1-1-1-1, ")
    assert "not priced  --overlap-grad-reduce: not understood" in shown
    assert "--global-batch-size 32" in shown
    assert answer["trainer_run"]["given"]["config"] == "1-1-1-1"
    assert answer["trainer_run"]["better"]["predicted"]["seconds_per_minibatch"] > 0
    assert (
        answer["asked"]["plan"]["microbatch_size"] * answer["asked"]["plan"]["microbatches"] == 32
    )


RUNS = {
    "torchtitan": (
        "run.toml",
        "[training]\nlocal_batch_size = 1\nglobal_batch_size = 32\nseq_len = 16\n"
        "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 1\n"
        "pipeline_parallel_first_stage_less_layers = 0\n"
        "pipeline_parallel_last_stage_less_layers = 0\n"
        "enable_async_tensor_parallel = true\n[compile]\nenable = true\n",
        ("--gpus", "4"),
        "1-1-1-1",
    ),
    "deepspeed": (
        "ds_config.json",
        '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, '
        '"offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}}',
        ("--gpus", "4", "--batch-size", "1", "--minibatch", "32"),
        "4",
    ),
    "accelerate": (
        "config.yaml",
        "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_offload_params: true\n",
        ("--batch-size", "1", "--minibatch", "32"),  # the file says how many GPUs
        "4",
    ),
}


@pytest.mark.parametrize("trainer", RUNS)
def test_a_trainers_file_is_priced_and_bettered(trainer: str, tmp_path: Path) -> None:
    if trainer == "accelerate":
        pytest.importorskip("yaml")
    name, content, more, config = RUNS[trainer]
    (tmp_path / "model.py").write_text(TRANSFORMER)
    (tmp_path / name).write_text(content)
    asked = ("fit", "model.py", f"--{trainer}", name, *more)
    fitted = plan(*asked, "--json", cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    answer = json.loads(fitted.stdout)
    assert answer["trainer_run"]["given"]["config"] == config
    shown = shown_of(answer)
    assert shown.startswith("as given")
    assert "not understood, so this is the price of a run without" in shown
    if trainer == "accelerate":
        assert plan(*asked, cwd=tmp_path).stdout.startswith("as given")
    if trainer == "torchtitan":
        assert "samples are as long as 'model.py' says, and not 16 tokens" in shown


def test_days_and_cost_are_part_of_the_answer(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TRANSFORMER)
    price = ("--train-tokens", "2B", "--dollars-per-gpu-hour", "1.5")
    fitted = plan("fit", "model.py", "--gpus", "2", "--minibatch", "8", *price, cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    assert "a training on 2B tokens: 2 GPUs, " in fitted.stdout
    assert re.search(r"cheapest of these: \d GPUs?, [\d.]+ days, \$[\d.]+", fitted.stdout)


def test_kinds_of_gpus_have_their_own_times_memory_and_links(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    links = "v100=nvlink2,10Gbps,t4=4GB/s,50Gbps"
    asked = ("--gpu", "v100=8,t4=4", "--batch-size", "4", "--bandwidth", links, "--json")
    fitted = plan("fit", "model.py", *asked, cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    answer = json.loads(fitted.stdout)

    cluster = answer["asked"]["plan"]["cluster"]
    levels = [(level["size"], level["bandwidth_bytes_per_s"]) for level in cluster["levels"]]
    assert levels == [(4, 4e9), (3, 1.25e9)]
    v100, t4 = cluster["kinds"]
    assert [(each["name"], each["count"]) for each in (v100, t4)] == [("v100", 8), ("t4", 4)]
    assert v100["link_ratios"] == [150e9 * 0.76 / 4e9, 1.0]
    assert t4["link_ratios"] == [1.0, 5.0]
    assert v100["memory_bytes"] > t4["memory_bytes"]

    assert [(row["gpus"], row["kinds"]) for row in answer["others"]] == [(8, "8 v100"), (4, "4 t4")]
    for row in answer["others"]:
        assert row["plan"]["cluster"]["kinds"][0]["count"] == row["gpus"]
    # the other verbs read what was written
    assert plan("show", cwd=tmp_path).returncode == 0
    solved = ("--gpus", "12", "--kinds", "v100=8,t4=4", "--bandwidth", "1Gbps")
    assert plan("solve", *solved, cwd=tmp_path).returncode == 0


def test_kinds_of_gpus_as_python_gives_them(tmp_path: Path) -> None:
    """As a mapping, in one server or in several; the profile of each kind is its own estimate."""
    (tmp_path / "model.py").write_text(MODEL)
    how: dict[str, Any] = {"batch_size": 4, "dtype": "float16", "tensor": (1,)}
    mixed = planner.fit(
        tmp_path / "model.py", gpu={"V100": 2, "t4": 2}, servers=1, bandwidth="pcie3", **how
    )
    assert mixed.asked.plan is not None
    assert [level.size for level in mixed.asked.plan.cluster.levels] == [4]
    both = planner.load_profile(tmp_path / "profile.json")
    for kind, name in zip(both.kinds or (), ("v100", "t4"), strict=True):
        planner.fit(tmp_path / "model.py", 2, gpu=name, **how)
        alone = planner.load_profile(tmp_path / "profile.json")
        own = profile_on(both, DeviceKind(count=1, name=kind.name))
        assert (own.layers, own.device) == (alone.layers, alone.device)


def test_one_kind_with_its_number_is_that_many_gpus(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    answers = [
        json.loads(plan("fit", "model.py", *asked, "--json", cwd=tmp_path).stdout)["asked"]
        for asked in (("--gpu", "t4=4"), ("--gpu", "t4", "--gpus", "4"))
    ]
    one, other = (answer["plan"] for answer in answers)
    assert one["cluster"] == other["cluster"]
    assert one["stages"] == other["stages"]
    assert not one["cluster"]["kinds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("model.py", "--gpus", "2", "--megatron", "--micro-batch-size 1"),
            "the string has no --global-batch-size",
        ),
        (
            (
                *("model.py", "--gpus", "2", "--minibatch", "4"),
                *("--megatron", "--micro-batch-size 1 --global-batch-size 4"),
            ),
            "--minibatch cannot be combined with --megatron",
        ),
        (
            (
                *("model.py", "--gpus", "2"),
                *("--megatron", "--micro-batch-size 1 --global-batch-size 4"),
            ),
            "Megatron splits transformers by layers, and",
        ),
        (("model.py", "--gpus", "2", "--train-tokens", "4Q"), "'4Q' is no number of tokens"),
        (("no-such-model", "--gpus", "2"), "there is no model 'no-such-model'"),
        (("absent.py", "--gpus", "2"), "absent.py"),
        (
            ("model.py", "--gpus", "6", "--servers", "4"),
            "6 GPUs do not split evenly over 4 servers\nhint: give --servers as one of 1, 2, 3, 6",
        ),
        (
            # by its name a link inside servers, while a rate would be that between them
            ("model.py", "--gpus", "4", "--servers", "2", "--bandwidth", "pcie4"),
            "--bandwidth has 1 rate for 2 servers",
        ),
        (
            ("model.py", "--gpus", "4", "--bandwidth", "1Gbps,1Gbps"),
            "--bandwidth has 2 rates for 1 server",
        ),
        (
            ("model.py", "--gpus", "2", "--length", "64"),
            "'model.py' says itself how long its samples are",
        ),
        (("model.py", "--gpus", str(10**12)), "a cluster of 1000000000000 GPUs is beyond"),
        (("model.py", "--gpus", "0"), "'0' is not a number of 1 or more"),
        (("model.py",), "--gpus"),
        (
            ("model.py", "--gpu", "v100=2,t5=2"),
            "unknown GPU 't5' in --gpu\nhint: known are titan-x",
        ),
        (("model.py", "--gpu", "v100=2,t4=0"), "--gpu has 0 GPUs of the kind t4"),
        (
            ("model.py", "--gpu", "v100=2,t4"),
            "'t4' in --gpu v100=2,t4 does not say how many GPUs of which kind there are\n"
            "hint: write NAME=N,NAME=N, as in --gpu v100=12,t4=4",
        ),
        (("model.py", "--gpu", "v100=2,v100=4"), "--gpu v100=2,v100=4 names v100 twice"),
        (
            ("model.py", "--gpu", "v100=2,t4=2", "--gpus", "8"),
            "--gpu v100=2,t4=2 are 4 GPUs, not --gpus 8\nhint: leave out --gpus",
        ),
        (("model.py", "--gpu", "t4=2", "--gpus", "8"), "--gpu t4=2 are 2 GPUs, not --gpus 8"),
        (
            ("model.py", "--gpu", "v100=4,t4=4", "--servers", "3"),
            "8 GPUs do not split evenly over 3 servers",
        ),
        (
            ("model.py", "--gpu", "v100=4,t4=4", "--bandwidth", "a100=nvlink3,1Gbps"),
            "--bandwidth has rates of a100, and the GPUs are v100, t4",
        ),
        (
            ("model.py", "--gpu", "v100=4,t4=4", "--bandwidth", "v100=nvlink2,t4=1Gbps,1Gbps"),
            "--bandwidth has 1 rate for 2 servers",
        ),
        (
            ("model.py", "--gpu", "v100=4,t4=4", "--bandwidth", "1Gbps,v100=1Gbps"),
            "'1Gbps' in --bandwidth 1Gbps,v100=1Gbps comes before the name of a kind",
        ),
        (
            ("model.py", "--gpus", "4", "--bandwidth", "t4=1Gbps"),
            "--bandwidth has rates of kinds of GPUs, and all GPUs are a100-80gb",
        ),
        (
            ("gpt2", "--gpu", "v100=4,t4=4", "--lora", "8", "--bits", "4"),
            "--bits 4 is not estimated for several kinds of GPUs",
        ),
        (
            ("model.py", "--gpu", "v100=4,a100=4", "--dtype", "bfloat16"),
            "device 'v100' has no bfloat16 arithmetic",
        ),
    ],
)
def test_wrong_questions_are_told_in_a_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    asked = plan("fit", *arguments, cwd=tmp_path)
    assert asked.returncode == 2
    assert message in asked.stderr
    assert not (tmp_path / "plan.json").exists()
