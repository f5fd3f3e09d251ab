"""A sentence transformer: two sentences through one network, compared with the mean of their words;
padded.
"""

import torch
from made_up import Samples, padded_text
from schedules import by_factor, linear_after_warm_up
from sentence_transformers.util import pairwise_cos_sim
from torch import nn
from torch.nn.functional import mse_loss
from transformers import MPNetConfig, MPNetModel

WORDS, LENGTH = 200, 16


class Pairs(nn.Module):
    """The forward of SentenceTransformer and CosineSimilarityLoss, without their tokenizer."""

    def __init__(self):
        super().__init__()
        self.words = MPNetModel(
            MPNetConfig(
                vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                intermediate_size=64, max_position_embeddings=LENGTH + 2,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        )  # fmt: skip

    def embed(self, tokens, mask):
        words = self.words(input_ids=tokens, attention_mask=mask).last_hidden_state
        return (words * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9)

    def forward(self, first, first_mask, second, second_mask):
        return pairwise_cos_sim(self.embed(first, first_mask), self.embed(second, second_mask))


def build_model():
    return Pairs()


def example_batch(batch_size):
    tokens = torch.randint(2, WORDS, (2, batch_size, LENGTH))
    mask = torch.ones_like(tokens[0])
    return (tokens[0], mask, tokens[1], mask), torch.rand(batch_size)


def sample(generator):
    first, first_mask, _ = padded_text(generator, WORDS, LENGTH)
    second, second_mask, _ = padded_text(generator, WORDS, LENGTH)
    return (first, first_mask, second, second_mask), torch.rand((), generator=generator)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)


def scheduler(optimizer):
    return by_factor(optimizer, linear_after_warm_up())
