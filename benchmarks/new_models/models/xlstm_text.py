"""xLSTM: matrix memories, and one layer of scalar ones that loops over the words; labels of the
padding are ignored.

The loop asks whether its state is still zero, which decides by values, so the file names the
blocks.
"""

import torch
from made_up import IGNORED, Samples, padded_text
from schedules import by_factor, cosine_after_warm_up, matrices_decay
from torch.nn.functional import cross_entropy
from xlstm import (
    FeedForwardConfig,
    mLSTMBlockConfig,
    mLSTMLayerConfig,
    sLSTMBlockConfig,
    sLSTMLayerConfig,
    xLSTMLMModel,
    xLSTMLMModelConfig,
)

WORDS, LENGTH = 128, 16


def build_model():
    matrices = mLSTMLayerConfig(num_heads=4, conv1d_kernel_size=4, qkv_proj_blocksize=4)
    scalars = sLSTMLayerConfig(backend="vanilla", num_heads=4, conv1d_kernel_size=4)
    return xLSTMLMModel(
        xLSTMLMModelConfig(
            vocab_size=WORDS, embedding_dim=32, num_blocks=4, context_length=LENGTH, slstm_at=[1],
            mlstm_block=mLSTMBlockConfig(mlstm=matrices),
            slstm_block=sLSTMBlockConfig(
                slstm=scalars, feedforward=FeedForwardConfig(proj_factor=1.3, act_fn="gelu")
            ),
        )
    )  # fmt: skip


def blocks(model):
    stack = model.xlstm_block_stack
    return [model.token_embedding, *stack.blocks, stack.post_blocks_norm, model.lm_head]


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    return tokens, tokens.roll(-1, 1)


def sample(generator):
    tokens, _, labels = padded_text(generator, WORDS, LENGTH + 1)
    labels[0] = tokens[0]
    return tokens[:-1], labels[1:]


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED)


def optimizer(named_parameters):
    return torch.optim.AdamW(matrices_decay(named_parameters, 0.1), lr=1e-3, betas=(0.9, 0.95))


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
