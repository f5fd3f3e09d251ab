"""The published recipes that answers are priced beside: they are runs, as published."""

from __future__ import annotations

import csv

import pytest

from benchmarks.expert.recipes import FMS, OPEN, RECIPES, SAME, Recipe, Row, llama_tokens, summary
from benchmarks.kept import ANCHORS
from planner.formats.files import replace

LAYERS = {
    "llama-7b": 32,
    "llama-13b": 40,
    "llama-2-34b": 48,
    "llama-3-8b": 32,
    "llama-3.1-8b": 32,
    "llama-3-70b": 80,
    "gpt3-5b": 24,
    "gpt3-20b": 44,
    "gpt-oss-120b": 36,
    "qwen3-30b-a3b": 48,
}
FILES = {
    FMS: "fms-fsdp.csv",
    OPEN: "mlengineering-finetune-lengths.csv",
    "NeMo-Framework-Launcher": "nemo-launcher-h100-fp8.csv",
    "Megatron-Bridge": "megatron-bridge.csv",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_a_recipe_is_a_run_of_its_model_on_its_gpus(recipe: Recipe) -> None:
    assert recipe.run.replicas(recipe.gpus) >= 1
    counts = recipe.run.layers_of_stages(LAYERS[recipe.model])
    assert sum(counts) == LAYERS[recipe.model]
    assert len(counts) == recipe.run.pipeline * (recipe.run.chunks or 1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_a_recipes_speed_is_the_published_one(recipe: Recipe) -> None:
    folder = ANCHORS / "gpu"
    if not folder.exists():
        pytest.skip("published measurements are not at hand")
    rows = list(csv.DictReader((folder / FILES[recipe.source]).read_text().splitlines()))
    speeds = [speed(row) for row in rows if int(row["gpus"]) == recipe.gpus]
    assert any(each == pytest.approx(recipe.tokens, abs=1) for each in speeds)


def speed(row: dict[str, str]) -> float:
    """Tokens per second and GPU of a published row."""
    if "measured_tokens_per_s_per_gpu" in row:
        return float(row["measured_tokens_per_s_per_gpu"] or 0)
    return llama_tokens(float(row["measured_tflop_per_s_per_gpu"]), int(row["sequence_length"]))


def test_tokens_of_tera_flops() -> None:
    # 6 x 8.03e9 + 6 x 32 x 4096 x 8192 = 5.46e10 FLOP per token
    assert llama_tokens(54.62, 8192) == pytest.approx(1000, rel=1e-3)


def test_what_has_no_price_counts_as_no_slower_answer() -> None:
    row = Row(RECIPES[0], None, None, False, "no plan fits", 12.0)
    assert row.speedup is None
    assert row.of_measured is None
    assert list(summary([row, replace(row, seconds=61.0)])) == [
        "0 of 2 answers are slower than the recipe by our price.",
        "The longest took 61 s.",
    ]
    assert SAME < 1
