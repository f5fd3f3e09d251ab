"""Configurations for torchtitan, read by its own class where that is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import planner
from planner.errors import PlanError
from planner.formats.plan import Plan
from tests.executor.plans import in_groups, sharded
from tests.exports.plans import plan_of

STAGES = [
    ["tok_embeddings", "layers.0.attention"],
    ["layers.1.attention", "layers.1.norm", "norm", "loss"],
]


def written(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, int]]:
    """Return the configuration and the sizes of batches; without the package another class stands
    in.
    """
    if find_spec("torchtitan") is None:
        stand_in = type(sys)("torchtitan.config")
        stand_in.ParallelismConfig = SimpleNamespace  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchtitan", type(sys)("torchtitan"))
        monkeypatch.setitem(sys.modules, "torchtitan.config", stand_in)
    names: dict[str, Any] = {}
    exec(compile(planner.export(plan, "torchtitan"), "config.py", "exec"), names)
    return names["PARALLELISM"], names["BATCH"]


def test_degrees_and_modules_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    config, batch = written(in_groups(plan_of(STAGES, (2, 2)), 4), monkeypatch)
    assert (config.pipeline_parallel_degree, config.tensor_parallel_degree) == (2, 4)
    assert (config.data_parallel_replicate_degree, config.data_parallel_shard_degree) == (2, 1)
    assert config.pipeline_parallel_schedule == "1F1B"
    assert config.pipeline_parallel_microbatch_size == 4
    assert config.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "norm"],
    ]
    assert batch == {"local_batch_size": 16, "global_batch_size": 32}


def test_ranks_that_divide_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = in_groups(plan_of(STAGES, (2, 2)), 4).model_copy(update={"experts": 8})
    config, _ = written(plan, monkeypatch)
    assert config.expert_parallel_degree == config.tensor_parallel_degree == 4


def test_ranks_that_divide_experts_alone_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = in_groups(plan_of(STAGES, (2, 2)), 4).model_copy(
        update={"experts": 8, "by_samples": True}
    )
    config, batch = written(plan, monkeypatch)
    assert (config.expert_parallel_degree, config.tensor_parallel_degree) == (4, 1)
    assert config.data_parallel_replicate_degree == 8
    assert batch == {"local_batch_size": 4, "global_batch_size": 32}


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)


class Vision(nn.Module):
    """As a ViT: a child with a child of its own, a list that is divided, and a Sequential that is
    not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = Patches()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def kept_by_torchtitan(model: nn.Module, names: list[str]) -> set[str]:
    """The leaves that its `_split_module` keeps: elements of lists, and other direct children, that
    are named.
    """
    kept: set[str] = set()
    for child, module in model.named_children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            elements = {f"{child}.{element}": part for element, part in module.named_children()}
        else:
            elements = {child: module}
        for name, part in elements.items():
            if name in names:
                kept.update(
                    f"{name}.{leaf}".rstrip(".")
                    for leaf, m in part.named_modules()
                    if not [*m.children()]
                )
    return kept


def test_every_stage_keeps_its_layers_in_torchtitans_splitter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = [
        ["patch_embed.proj", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "head.0", "head.1", "loss"],
    ]
    config, _ = written(plan_of(stages), monkeypatch)
    for stage, names in zip(stages, config.module_fqns_per_model_part, strict=True):
        assert kept_by_torchtitan(Vision(), names) == set(stage) - {"loss"}
    text = planner.export(plan_of(stages), "torchtitan")
    assert "# blocks must be a ModuleList or ModuleDict: torchtitan shards no other." in text


def test_sharded_stages_are_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sharded(plan_of([[name for stage in STAGES for name in stage]], (2,)))
    config, batch = written(plan, monkeypatch)
    assert (config.data_parallel_replicate_degree, config.data_parallel_shard_degree) == (1, 2)
    assert config.pipeline_parallel_degree == config.tensor_parallel_degree == 1
    assert batch == {"local_batch_size": 16, "global_batch_size": 32}


def test_what_it_cannot_express() -> None:
    with pytest.raises(
        PlanError, match=r"'layers\.1' is in stage 0, and 'layers\.0' before it in the model"
    ):
        planner.export(plan_of([["embed", "layers.1.mlp"], ["layers.0.mlp", "loss"]]), "torchtitan")
    with pytest.raises(
        PlanError, match=r"torchtitan can only cut .* before stage 1 is inside 'transformer'"
    ) as caught:
        planner.export(
            plan_of([["transformer.h.0.mlp"], ["transformer.h.1.mlp", "loss"]]), "torchtitan"
        )
    assert "system=megatron" in caught.value.hint, "other cuts of such a model do not help"
    with pytest.raises(PlanError, match=r"cut before stage 1 is inside 'layers\.1'"):
        planner.export(
            plan_of([["layers.0.mlp", "layers.1.attention"], ["layers.1.mlp", "loss"]]),
            "torchtitan",
        )
    with pytest.raises(
        PlanError, match="torchtitan copies whole pipelines, so it has no form for '2-1'"
    ):
        planner.export(plan_of(STAGES, (2, 1)), "torchtitan")


@pytest.mark.parametrize(("schedule", "differs"), [("v-half", True), ("zb-v", False)])
def test_a_schedule_that_torchtitan_lacks_is_named(schedule: str, differs: bool) -> None:
    parts = [["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "loss"]]
    plan = plan_of(parts)
    stages = [
        stage.model_dump() | {"ranks": (rank,)}
        for stage, rank in zip(plan.stages, (0, 1, 1, 0), strict=True)
    ]
    plan = Plan.model_validate(plan.model_dump() | {"schedule": schedule, "stages": stages})
    text = " ".join(planner.export(plan, "torchtitan").replace("# ", "").split())
    assert 'pipeline_parallel_schedule="ZBVZeroBubble"' in text
    assert ("torchtitan has no v-half. ZBVZeroBubble is the nearest" in text) == differs
