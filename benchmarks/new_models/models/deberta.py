"""DeBERTa v2: attention to contents and to relative positions; labels of tokens, some of which do
not count.
"""

import torch
from made_up import Samples, padded_text
from transformers import DebertaV2Config, DebertaV2ForTokenClassification

WORDS, LENGTH, CLASSES = 200, 20, 7


def build_model():
    return DebertaV2ForTokenClassification(
        DebertaV2Config(
            vocab_size=WORDS, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
            relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True,
            norm_rel_ebd="layer_norm", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
        )
    )  # fmt: skip


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    labels = torch.randint(0, CLASSES, (batch_size, LENGTH))
    return (
        (),
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels},
        None,
    )


def sample(generator):
    tokens, mask, labels = padded_text(generator, WORDS, LENGTH)
    labels = torch.where(labels == -100, labels, labels % CLASSES)
    return (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None


def dataset():
    return Samples(sample, 52)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
