"""Models of `transformers`, built from small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.graph import LayerGraph
from planner.model.stage.evaluation import matching_cut
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

transformers = pytest.importorskip(
    "transformers", reason="needs the extra 'hf': pip install 'transformers>=4.50'"
)

# The library picks another attention kernel when it is traced; this one is the same in both.
SAME_KERNEL = {"attn_implementation": "eager"}
TOKENS = 64
SMALL = {"vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "use_cache": False,
}
END = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        **END,
        **options,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, num_attention_heads=2, max_position_embeddings=16, **options
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _t5(**options: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=TOKENS,
        **sizes,
        decoder_start_token_id=0,
        use_cache=False,
        tie_word_embeddings=True,
        **options,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def _llama(**options: Any) -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, **HEADS, **END, **options)
    )
    return model


def _mixtral(**options: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**SMALL, **HEADS, **END, **experts, **options)
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def _tokens(batch_size: int) -> Batch:
    tokens = torch.randint(0, TOKENS, (batch_size, 8))
    return Batch((), {"input_ids": tokens, "labels": tokens.clone()}, None)


def _masked(batch_size: int) -> Batch:
    tokens = torch.randint(0, TOKENS, (batch_size, 8))
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    return Batch((), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}, None)


def _translation(batch_size: int) -> Batch:
    tokens = torch.randint(0, TOKENS, (batch_size, 8))
    return Batch(
        (), {"input_ids": tokens, "labels": torch.randint(0, TOKENS, (batch_size, 6))}, None
    )


Build = Callable[..., nn.Module]
MODELS: dict[str, tuple[Build, Callable[[int], Batch]]] = {
    "gpt2": (_gpt2, _tokens),
    "bert": (_bert, _masked),
    "t5": (_t5, _translation),
    "llama": (_llama, _tokens),
    "mixtral": (_mixtral, _tokens),
}


@cache
def _graphs(name: str) -> tuple[LayerGraph, LayerGraph]:
    build, batch = MODELS[name]
    torch.manual_seed(1)
    model = build(**SAME_KERNEL)
    return capture(model, batch(4), None), capture(model.eval(), batch(4), None)


@pytest.mark.parametrize("batch_size", [4, 6])
@pytest.mark.parametrize("stages", [3, 7])
@pytest.mark.parametrize("name", MODELS)
def test_training_in_stages(name: str, stages: int, batch_size: int) -> None:
    graph, _ = _graphs(name)
    torch.manual_seed(2)
    batch = MODELS[name][1](batch_size)
    graph.model.train()
    torch.manual_seed(4)
    whole = run_model(graph, batch, None)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    split = run_split(graph, batch, cut_evenly(graph, stages), None)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(whole, split)


@pytest.mark.parametrize("stages", [3, 7])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_in_the_stages_of_training(name: str, stages: int) -> None:
    training, graph = _graphs(name)
    torch.manual_seed(2)
    batch = MODELS[name][1](6)
    graph.model.eval()
    cut = matching_cut(training, cut_evenly(training, stages), graph)
    whole = run_model(graph, batch, None)
    assert_same(whole, run_split(graph, batch, [names for names in cut if names], None))


@pytest.mark.parametrize("name", MODELS)
def test_the_default_attention_is_the_same_in_any_split(name: str) -> None:
    build, make_batch = MODELS[name]
    torch.manual_seed(1)
    graph = capture(build(), make_batch(4), None)
    batch = make_batch(4)
    steps = []
    for stages in (1, 3, 7):
        torch.manual_seed(4)
        steps.append(run_split(graph, batch, cut_evenly(graph, stages), None))
    assert_same(steps[0], steps[1])
    assert_same(steps[0], steps[2])
    torch.manual_seed(4)
    whole = run_model(graph, batch, None)
    torch.testing.assert_close(steps[0].loss, whole.loss)
    torch.testing.assert_close(steps[0].gradients, whole.gradients)
