"""Models by name: the folder that is written builds them, and what is no model is named in one
sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.catalog.models import MODELS, NamedModel, find_model
from planner.errors import InputError, PlanError
from planner.model.spec import load_model_file

HF = "needs the extra 'hf': pip install 'transformers>=4.50'"
# Parameters as published, in the sources that planner/catalog/models.py lists.
PUBLISHED = {
    "gpt2": 124e6,
    "gpt2-xl": 1.56e9,
    "bert-large": 335e6,
    "t5-large": 738e6,
    "vit-large": 304e6,
    "gpt-neox-20b": 20.6e9,
    "llama-7b": 6.74e9,
    "llama-70b": 69e9,
    "llama-3-8b": 8.03e9,
    "mistral-7b": 7.24e9,
    "qwen2.5-7b": 7.62e9,
    "t5-3b": 2.85e9,
    "t5-11b": 11.3e9,
    "vit-g": 1.01e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.19e9,
    "qwen3-30b-a3b": 30.5e9,
    "mixtral-8x7b": 46.7e9,
    "gemma-2b": 2.51e9,
    "gemma-7b": 8.54e9,
    "gemma-2-27b": 27.2e9,
    "deepseek-v2-lite": 15.7e9,
    "llama-3.2-1b": 1.24e9,
    "mistral-nemo-12b": 12.2e9,
    "mixtral-8x22b": 141e9,
    "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-32b": 32.8e9,
    "qwen3-235b-a22b": 235e9,
    "phi-3-mini": 3.82e9,
    "phi-4": 14.7e9,
    "gemma-3-1b": 1.0e9,
    "opt-66b": 65.7e9,
    "bloom-176b": 176e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 117e9,
}


@pytest.mark.parametrize(
    ("name", "plain", "like"),
    [
        ("Llama-2-7b", "llama-2-7b", "llama-7b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b", "llama-3-70b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", "mixtral-8x7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b", "qwen3-8b"),
        ("bert-large-uncased", "bert-large", "bert-large"),
        ("google-t5/t5-3b", "t5-3b", "t5-3b"),
    ],
)
def test_names_of_a_hub_are_names(name: str, plain: str, like: str) -> None:
    pytest.importorskip("transformers", reason=HF)
    found = find_model(name)
    assert (found.name, found.config) == (plain, MODELS[like])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_built_in_models_have_their_published_sizes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=HF)
    spec = load_model_file(str(find_model(name).write(tmp_path, tokens=16)))
    with torch.device("meta"):
        parameters = sum(each.numel() for each in spec.build_model().parameters())
    assert parameters == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_built_in_model_says_what_transformers_needs(name: str) -> None:
    assert set(MODELS[name]) > {"architectures", "model_type"}


def test_a_folder_trains_a_batch(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=HF)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 50,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_model(str(tmp_path / "config.json"))
    assert model.name == tmp_path.name
    assert model.tokens(None) == 2048
    spec = load_model_file(str(model.write(tmp_path / "folder", tokens=16)))
    inputs = spec.example_batch(3).kwargs
    assert {key: tuple(value.shape) for key, value in inputs.items()} == {
        "input_ids": (3, 16),
        "labels": (3, 16),
    }
    spec.build_model()(**inputs).loss.backward()


def test_a_function_that_cannot_be_captured_is_pytorchs_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=HF)
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    named = NamedModel(
        "bloom", {"architectures": ["BloomForCausalLM"], "model_type": "bloom", **sizes}
    )
    profile = planner.estimate(named.write(tmp_path, tokens=16), batch_size=1, device="l4")
    [own] = [layer for layer in profile.layers if layer.name.endswith("gelu_impl")]
    inputs = torch.randn(9, requires_grad=True)
    from transformers.models.bloom.modeling_bloom import BloomGelu

    theirs, ours = BloomGelu()(inputs), torch.nn.GELU(approximate="tanh")(inputs)
    assert own.forward_s > 0
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.sum(), inputs)[0] for each in (ours, theirs))
    )


def test_a_folder_of_another_model_is_kept(tmp_path: Path) -> None:
    model = NamedModel("own", {"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    (tmp_path / "model.py").write_text("mine = True\n")
    with pytest.raises(InputError, match="is of another model"):
        model.write(tmp_path, tokens=16)
    assert (tmp_path / "model.py").read_text() == "mine = True\n"
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("lama-7b", None, "there is no model 'lama-7b'", "did you mean llama-7b"),
        ("absent.json", None, "'absent.json' cannot be read as JSON: No such file", "config.json"),
        ("bad.json", "{", "'bad.json' cannot be read as JSON", "config.json"),
        ("list.json", "[]", "'list.json' has no field 'architectures'", "LlamaForCausalLM"),
        (
            "half.json",
            '{"architectures": ["X"]}',
            "'half.json' has no field 'model_type'",
            "LlamaForCausalLM",
        ),
    ],
)
def test_what_is_no_model_is_told(
    name: str,
    content: str | None,
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as raised:
        find_model(name)
    assert raised.value.message.startswith(message)
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("architecture", "model_type", "told"),
    [
        (
            "FooForCausalLM",
            "llama",
            "transformers cannot load 'strange': it has no class FooForCausalLM",
        ),
        (
            "LlamaForCausalLM",
            "foo",
            "transformers cannot load 'strange': Unrecognized model identifier: foo",
        ),
    ],
)
def test_a_model_that_transformers_does_not_have_is_named(
    architecture: str, model_type: str, told: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason=HF)
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    with pytest.raises(InputError) as caught:
        find_model(str(path)).tokens(None)
    assert caught.value.message == told


SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
PEFT = "needs peft: pip install peft"
# peft 0.21 asks transformers 5.24 by a name that it calls deprecated.
OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@OLD_NAME
def test_a_folder_with_adapters_trains_nothing_else(tmp_path: Path) -> None:
    """Rank times inputs and outputs of the seven linear layers of each block."""
    pytest.importorskip("transformers", reason=HF)
    pytest.importorskip("peft", reason=PEFT)
    spec = load_model_file(str(NamedModel("small", SMALL).write(tmp_path, 16, lora_rank=4)))
    model = spec.build_model()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert sum(each.numel() for each in trained.values()) == 8 * (4 * (256 + 256) + 3 * (256 + 512))

    model(**spec.example_batch(3).kwargs).loss.backward()
    assert {name for name, each in model.named_parameters() if each.grad is not None} == set(
        trained
    )


@OLD_NAME
def test_fit_counts_what_is_trained(tmp_path: Path) -> None:
    """Frozen weights have neither gradients nor optimizer state, and a minibatch is small; with 4
    bits, most of the weights are a quarter as large.
    """
    pytest.importorskip("transformers", reason=HF)
    pytest.importorskip("peft", reason=PEFT)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    weights = dict[int, int]()
    for bits in (16, 4):
        folder = tmp_path / str(bits)
        asked: dict[str, Any] = {"bits": 4} if bits == 4 else {}
        fitted = planner.fit(
            tmp_path / "config.json", 2, gpu="rtx-4090", lora=4, length=16, place=folder, **asked
        )
        plan = fitted.asked.plan
        assert plan is not None
        assert plan.samples_per_update == (16, 16)
        profile = planner.load_profile(folder / "profile.json")
        frozen = [layer for layer in profile.layers if ".lora_" not in layer.name]
        assert not any(layer.gradient_bytes or layer.optimizer_bytes for layer in frozen)
        adapters = [layer for layer in profile.layers if ".lora_" in layer.name]
        assert all(layer.gradient_bytes and layer.optimizer_bytes for layer in adapters)
        weights[bits] = sum(
            layer.weight_bytes for layer in frozen if layer.name.endswith(".base_layer")
        )
    assert weights[4] == pytest.approx(weights[16] * 4.127 / 16, rel=0.01)
    quantized = planner.load_plan(tmp_path / "4" / "plan.json")
    with pytest.raises(PlanError, match="a frozen base in 4 bits"):
        planner.train(tmp_path / "4" / "model.py", quantized)


def test_states_of_fewer_bits_take_less_memory(tmp_path: Path) -> None:
    """Beside masters of 4 bytes: two moments of 4 bytes, of 2, or of 1 and a scale."""
    pytest.importorskip("transformers", reason=HF)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    asked: dict[str, Any] = {"gpu": "h100", "length": 16, "batch_size": 1, "time_limit_s": 20}
    sizes = []
    for states in ("float32", "bfloat16", "int8"):
        folder = tmp_path / states
        planner.fit(tmp_path / "config.json", 2, optimizer_states=states, place=folder, **asked)
        profile = planner.load_profile(folder / "profile.json")
        sizes.append(sum(layer.optimizer_bytes for layer in profile.layers))
        assert profile.chunked_loss is not None
        assert profile.chunked_loss.head == "lm_head"
    assert sizes[1] == pytest.approx(sizes[0] * 8 / 12, rel=0.01)
    assert sizes[2] == pytest.approx(sizes[0] * (4 + 2 * (1 + 4 / 256)) / 12, rel=0.02)


def test_an_offloaded_optimizer_fits_where_it_does_not_on_the_gpu(tmp_path: Path) -> None:
    """The host has masters and moments, 12 bytes of each weight; its memory is in the answer."""
    pytest.importorskip("transformers", reason=HF)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    asked: dict[str, Any] = {"gpu": "h100", "length": 16, "batch_size": 1, "minibatch": 4}
    usual = planner.fit(tmp_path / "config.json", 1, place=tmp_path / "usual", **asked)
    offloaded = planner.fit(
        tmp_path / "config.json", 1, offload="optimizer", place=tmp_path / "there", **asked
    )
    plans = usual.asked.plan, offloaded.asked.plan
    assert plans[0] is not None
    assert plans[1] is not None
    states = plans[0].stages[0].memory.optimizer_bytes
    assert plans[1].host_bytes == {0: states}
    assert plans[1].stages[0].memory.optimizer_bytes == 0
    assert "on the host" in str(offloaded)
    with pytest.raises(PlanError, match="in the memory of the host, whose CPU steps them"):
        planner.train(tmp_path / "there" / "model.py", plans[1])


@pytest.mark.slow  # estimates and searches of a large model
@pytest.mark.parametrize(
    ("gpus", "gpu", "fits"),
    [(1, "a100-80gb", (False, True)), (2, "a100-80gb", (None, True))],
)
def test_llama_8b_with_the_optimizer_on_gpus_and_on_the_host(
    gpus: int, gpu: str, fits: tuple[bool | None, bool], tmp_path: Path
) -> None:
    """8.03 billion weights of 2 bytes with gradients of 4 stay on the GPUs: 48 GB. None: not
    asked.
    """
    pytest.importorskip("transformers", reason=HF)
    asked: dict[str, Any] = {"gpu": gpu, "batch_size": 1, "minibatch": 32, "time_limit_s": 120}
    for offload, fitting in zip((None, "optimizer"), fits, strict=True):
        if fitting is None:
            continue
        asked |= {"offload": offload, "place": tmp_path / str(offload)}
        plan = planner.fit("llama-3.1-8b", gpus, **asked).asked.plan
        assert (plan is not None) == fitting
        if plan is None or offload is None:
            continue
        copies = max(1, sum(plan.host_bytes.values()) // (12 * 8 * 10**9))
        assert sum(plan.host_bytes.values()) == pytest.approx(copies * 12 * 8.03e9, rel=0.01)
        if gpus == 1:
            link, step = 0.8 * 31.5e9, 28 * 10e9 / 2.57
            update_s = 8.03e9 * ((4 + 2) / link + (2 * 12 + 4 + 2) / step)
            assert plan.stages[0].update_s == pytest.approx(update_s, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"bits": 4}, "`bits=4` is for frozen weights, and nothing is frozen\nhint: .*`lora=16`"),
        ({"bits": 8, "lora": 4}, "`bits=8` is not estimated\nhint: give `bits=4`"),
        ({"lora": 4}, "'model.py' says itself what is trained, so `lora=4` has no meaning"),
        (
            {"optimizer_states": "bfloat16"},
            "'model.py' says itself what optimizer trains it, so `optimizer_states=bfloat16`",
        ),
        ({"lora": 0}, "`lora=0` is too small"),
        (
            {"dollars_per_gpu_hour": 2.0},
            "`dollars_per_gpu_hour=2` is no price of a training whose length is unknown",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    asked: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        planner.fit("model.py", 2, **asked)
    assert not list(tmp_path.iterdir())
