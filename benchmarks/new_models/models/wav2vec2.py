"""wav2vec 2.0 for speech recognition. CTC's loss looks at the lengths' values, so the file names
the blocks.
"""

import torch
from made_up import Samples
from torch import nn
from torch.nn.functional import ctc_loss
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

SOUND, LETTERS, LENGTH = 1600, 20, 8


def build_model():
    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=LETTERS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            conv_dim=(16, 16, 16), conv_stride=(5, 4, 2), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0, hidden_dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        )
    )  # fmt: skip


class Front(nn.Module):
    """From sound to the first layer of the encoder."""

    def __init__(self, model):
        super().__init__()
        self.features, self.projection, self.encoder = (
            model.feature_extractor,
            model.feature_projection,
            model.encoder,
        )

    def forward(self, sound):
        hidden, _ = self.projection(self.features(sound).transpose(1, 2))
        return self.encoder.layer_norm(hidden + self.encoder.pos_conv_embed(hidden))


class Head(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.lm_head = model.lm_head

    def forward(self, hidden):
        return {"logits": self.lm_head(hidden)}


def blocks(model):
    return [Front(model.wav2vec2), *model.wav2vec2.encoder.layers, Head(model)]


def example_batch(batch_size):
    labels = torch.randint(1, LETTERS, (batch_size, LENGTH))
    return torch.randn(batch_size, SOUND), labels


def sample(generator):
    labels = torch.randint(1, LETTERS, (LENGTH,), generator=generator)
    used = int(torch.randint(2, LENGTH + 1, (), generator=generator))
    labels = labels.where(torch.arange(LENGTH) < used, -100)
    return torch.randn(SOUND, generator=generator), labels


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    scores = output["logits"].log_softmax(-1).transpose(0, 1)
    times = torch.full(target.shape[:1], scores.shape[0])
    return ctc_loss(scores, target.clamp(min=0), times, (target >= 0).sum(1), zero_infinity=True)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
