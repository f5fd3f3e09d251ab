"""OPT with (IA)3 of peft: vectors that scale activations are all that trains."""

import torch
from made_up import Samples, padded_text
from peft import IA3Config, get_peft_model
from transformers import OPTConfig, OPTForCausalLM

WORDS, LENGTH = 256, 24


def build_model():
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=WORDS, hidden_size=48, ffn_dim=96, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=64, word_embed_proj_dim=48, dropout=0.0, use_cache=False,
        )
    )  # fmt: skip
    targets = ["k_proj", "v_proj", "fc2"]
    return get_peft_model(
        model, IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=["fc2"])
    )


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
