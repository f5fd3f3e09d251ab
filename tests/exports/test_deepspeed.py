"""The file for DeepSpeed, run against its package where that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import PlanError
from planner.formats.plan import Plan
from planner.formats.plan_parts import Shared
from tests.executor.plans import in_groups
from tests.exports.plans import plan_of

TIMEOUT_S = 240

STAGES = [["features.0", "features.2"], ["features.3", "h.0.attn", "h.0.mlp"], ["h.1.attn", "h.1.mlp", "loss"]]


class PipelineModule:
    """What the file uses of DeepSpeed's class of this name."""

    def __init__(self, layers: list[Any], num_stages: int | None = None, topology: Any = None) -> None:
        self.num_stages, self.topology = num_stages, topology
        self.global_rank = 1
        self._topo = type("Topology", (), {"get_coord": lambda self, rank: type("Coordinates", (), {"pipe": rank})()})()
        self._partition_layers(method="parameters")

    def _partition_layers(self, method: str) -> None:
        raise NotImplementedError

    def _set_bounds(self, start: int, stop: int) -> None:
        self.bounds = (start, stop)


def written(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names in the exported file; PipelineModule is a stand-in."""
    stand_in = type(sys)("deepspeed.pipe")
    stand_in.PipelineModule = PipelineModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", type(sys)("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", stand_in)
    names: dict[str, Any] = {"__name__": "pipeline_partition"}
    exec(compile(planner.export(plan, "deepspeed"), "pipeline_partition.py", "exec"), names)
    return names


def test_stages_begin_where_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = written(plan_of(STAGES), monkeypatch)
    assert names["partition"](["features.0", "features.1", "features.2", "features.3", "h.0", "h.1"]) == [0, 3, 5, 6]
    every_layer = [name for stage in STAGES for name in stage]
    module = names["PlannedPipelineModule"](layers=every_layer, names=every_layer)
    assert (module.parts, module.bounds) == ([0, 2, 5, 8], (2, 5))
    assert names["CONFIG"] == {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}


def test_groups_of_ranks_are_an_axis_of_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's ranks go through pipe, data and model, as a plan's go through stages, replicas and ranks."""
    stand_in = type(sys)("deepspeed.runtime.pipe.topology")
    stand_in.PipeModelDataParallelTopology = lambda *axes: axes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.pipe.topology", stand_in)
    names = written(in_groups(plan_of(STAGES, (2, 2, 2)), 4), monkeypatch)
    every_layer = [name for stage in STAGES for name in stage]
    module = names["PlannedPipelineModule"](layers=every_layer, names=every_layer)
    assert (module.topology, module.num_stages) == ((3, 4, 2), None)


def test_sharded_stages_are_zero_1(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(STAGES, (2,) * len(STAGES))
    stages = tuple(stage.model_copy(update={"sharded": number > 0}) for number, stage in enumerate(plan.stages))
    names = written(plan.model_copy(update={"stages": stages}), monkeypatch)
    assert names["CONFIG"]["zero_optimization"] == {"stage": 1}


def test_layers_that_do_not_match_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = written(plan_of([["h.0.attn"], ["h.0.mlp"]]), monkeypatch)["partition"]
    with pytest.raises(ValueError, match=r"inside the layer 'h\.0': give its parts one by one"):
        partition(["h.0"])
    with pytest.raises(ValueError, match="which is none of the layers"):
        partition(["x"])


def test_branches_and_shared_weights_are_said() -> None:
    plan = plan_of([["a"], ["b"]])
    (sent,) = plan.transfers
    branching = plan.model_copy(
        update={
            "transfers": (sent.model_copy(update={"values": ("a", "skip")}),),
            "shared": (Shared(stages=(0, 1), weights=("a.weight",), gradient_bytes=4),),
        }
    )
    file = planner.export(branching, "deepspeed")
    compile(file, "pipeline_partition.py", "exec")
    text = file.replace("\n# ", " ")
    assert "several values cross cuts (2 from stage 0 to 1)" in text
    assert "Stages 0, 1 share a.weight: tie them there" in text
    text = planner.export(plan, "deepspeed")
    assert "several values" not in text
    assert "tie them" not in text


def test_what_it_cannot_express() -> None:
    with pytest.raises(PlanError, match="DeepSpeed copies whole pipelines, so it has no form for '3-1'"):
        planner.export(plan_of([["a"], ["b"]], (3, 1)), "deepspeed")
    text = planner.export(plan_of([["a"], ["b"]], (2, 2), "1f1b", 1), "deepspeed")
    assert "# The plan's schedule, 1f1b, keeps the pipeline full" in text
    assert '"gradient_accumulation_steps": 8' in text


USER_SCRIPT = """
import sys
import deepspeed
import torch
from torch import nn
from pipeline_partition import CONFIG, PlannedPipelineModule

# What makes gloo faster within a machine is compiled on first use.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
names, layers = zip(*nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))).named_children())
module = PlannedPipelineModule(layers=list(layers), names=names, loss_fn=nn.functional.mse_loss)
print("PARTS", module.parts, sorted(name for name, _ in module.named_parameters())[0], flush=True)
"""


@pytest.mark.slow
def test_with_deepspeed_itself(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed.pipe", reason="DeepSpeed is not installed")
    text = planner.export(plan_of([["0", "1", "2"], ["3", "4", "loss"]]), "deepspeed")
    (tmp_path / "pipeline_partition.py").write_text(text, encoding="utf-8")
    (tmp_path / "user.py").write_text(USER_SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "user.py"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    told = sorted(re.findall(r"PARTS (\[.*?\]) (\S+)", done.stdout))
    assert told == [("[0, 3, 5]", "0.bias"), ("[0, 3, 5]", "3.bias")]
