"""DeepSeek-V3: latent attention, experts chosen by sigmoids in groups; Muon for matrices, AdamW for
the rest.
"""

import torch
from made_up import Samples, padded_text
from pytorch_optimizer import Muon
from schedules import by_factor, trapezoid
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

WORDS, LENGTH = 200, 16


def build_model():
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
            n_routed_experts=8, kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4,
            qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=1, num_experts_per_tok=2,
            first_k_dense_replace=1, use_cache=False, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
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
    pairs = list(named_parameters)
    matrices = [w for n, w in pairs if w.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for _, weight in pairs if id(weight) not in chosen]
    groups = [
        {"params": matrices, "lr": 0.02, "use_muon": True},
        {"params": rest, "lr": 1e-3, "use_muon": False},
    ]
    return Muon(groups)


def scheduler(optimizer):
    return by_factor(optimizer, trapezoid())
