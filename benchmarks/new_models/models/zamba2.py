"""Zamba2: layers of Mamba-2, among which one block of attention is shared; texts are padded."""

import torch
from made_up import Samples, padded_text
from schedules import by_factor, cosine_after_warm_up, matrices_decay
from transformers import Zamba2Config, Zamba2ForCausalLM

WORDS, LENGTH = 200, 24
KINDS = ["mamba", "mamba", "hybrid"] * 2


def build_model():
    return Zamba2ForCausalLM(
        Zamba2Config(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=6, layers_block_type=KINDS, intermediate_size=64,
            num_attention_heads=4, num_key_value_heads=4, mamba_d_state=8, mamba_headdim=16,
            n_mamba_heads=4, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1,
            hybrid_layer_ids=[2, 5], adapter_rank=4, use_cache=False, pad_token_id=0,
            use_mem_rope=True,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    arguments = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
    }
    return (), arguments, None


def sample(generator):
    tokens, mask, labels = padded_text(generator, WORDS, LENGTH)
    return (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(named_parameters):
    return torch.optim.AdamW(matrices_decay(named_parameters, 0.1), lr=1e-3, betas=(0.9, 0.95))


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
