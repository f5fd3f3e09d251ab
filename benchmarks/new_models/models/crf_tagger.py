"""An LSTM with a conditional random field of pytorch-crf, the way sequences have been tagged for
years; padded.

The field checks its mask, which decides by values, so the file names the blocks.
"""

import torch
from made_up import Samples, padded_text
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torchcrf import CRF

WORDS, LENGTH, TAGS = 128, 12, 5


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 24, padding_idx=0)

    def forward(self, tokens, tags, mask):
        return self.words(tokens), tags, mask


class Recurrent(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.lstm = nn.LSTM(inputs, 16, bidirectional=True, batch_first=True)

    def forward(self, values):
        hidden, tags, mask = values
        return self.lstm(hidden)[0], tags, mask


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(32, TAGS)
        self.crf = CRF(TAGS, batch_first=True)

    def forward(self, values):
        hidden, tags, mask = values
        return -self.crf(self.scores(hidden), tags, mask=mask, reduction="token_mean")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Words(), Recurrent(24), Recurrent(32), Field()])

    def forward(self, tokens, tags, mask):
        values = self.parts[0](tokens, tags, mask)
        for part in self.parts[1:]:
            values = part(values)
        return values


def blocks(model):
    return list(model.parts)


def build_model():
    return Tagger()


def example_batch(batch_size):
    tokens = torch.randint(1, WORDS, (batch_size, LENGTH))
    tags = torch.randint(0, TAGS, tokens.shape)
    return {"tokens": tokens, "tags": tags, "mask": torch.ones_like(tokens).bool()}, None


def sample(generator):
    tokens, mask, _ = padded_text(generator, WORDS, LENGTH)
    tags = torch.randint(0, TAGS, (LENGTH,), generator=generator)
    return {"tokens": tokens, "tags": tags, "mask": mask.bool()}, None


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return output


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def scheduler(optimizer):
    return ExponentialLR(optimizer, gamma=0.9)
