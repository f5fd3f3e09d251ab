"""FT-Transformer of rtdl: a word for each column of a table; groups without decay are chosen by
names.
"""

import torch
from made_up import Samples
from rtdl_revisiting_models import FTTransformer
from torch.nn.functional import mse_loss

NUMBERS, KINDS = 6, [3, 5]


def build_model():
    return FTTransformer(
        n_cont_features=NUMBERS, cat_cardinalities=KINDS, d_out=1, n_blocks=3, d_block=32,
        attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden_multiplier=4 / 3,
        ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def example_batch(batch_size):
    kinds = torch.stack([torch.randint(0, kind, (batch_size,)) for kind in KINDS], 1)
    return (torch.randn(batch_size, NUMBERS), kinds), torch.randn(batch_size)


def sample(generator):
    kinds = torch.stack([torch.randint(0, kind, (), generator=generator) for kind in KINDS])
    numbers = torch.randn(NUMBERS, generator=generator)
    return (numbers, kinds), numbers.sum() + kinds.float().sum()


def dataset():
    return Samples(sample, 48)  # the model is captured for one size of microbatches


def loss(output, target):
    return mse_loss(output.squeeze(-1), target)


def optimizer(named_parameters):
    pairs = list(named_parameters)
    kept = ("cls_embedding", "cont_embeddings", "cat_embeddings", "_normalization", ".bias")
    without = [weight for name, weight in pairs if any(part in name for part in kept)]
    rest = [weight for name, weight in pairs if not any(part in name for part in kept)]
    groups = [{"params": rest}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-5)
