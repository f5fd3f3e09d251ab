"""Phi-3 with adapters of peft: DoRA, whose directions and lengths train while the model is
frozen.
"""

import torch
from made_up import Samples, padded_text
from peft import LoraConfig, get_peft_model
from transformers import Phi3Config, Phi3ForCausalLM

WORDS, LENGTH = 256, 24


def build_model():
    model = Phi3ForCausalLM(
        Phi3Config(
            vocab_size=WORDS, hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, pad_token_id=0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    adapters = LoraConfig(
        r=4, use_dora=True, target_modules=["qkv_proj", "o_proj"], init_lora_weights="gaussian"
    )
    return get_peft_model(model, adapters)


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    return (
        (),
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()},
        None,
    )


def sample(generator):
    tokens, mask, labels = padded_text(generator, WORDS, LENGTH)
    return (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)
