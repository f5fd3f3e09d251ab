"""CLIP of open_clip: a picture tower and a text tower, and a loss that compares all pairs of a
minibatch.
"""

import torch
from made_up import Samples
from open_clip import CLIP, ClipLoss

WORDS, LENGTH = 100, 12


def build_model():
    return CLIP(
        embed_dim=24,
        vision_cfg={"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32},
        text_cfg={
            "context_length": LENGTH,
            "vocab_size": WORDS,
            "width": 32,
            "heads": 4,
            "layers": 2,
        },
        output_dict=True,
    )


def example_batch(batch_size):
    return (torch.randn(batch_size, 3, 32, 32), torch.randint(1, WORDS, (batch_size, LENGTH))), None


def sample(generator):
    return (
        torch.randn(3, 32, 32, generator=generator),
        torch.randint(1, WORDS, (LENGTH,), generator=generator),
    ), None


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return ClipLoss()(output["image_features"], output["text_features"], output["logit_scale"])


def optimizer(named_parameters):
    named = list(named_parameters)
    plain = [p for name, p in named if p.ndim < 2 or "logit_scale" in name]
    rest = [p for name, p in named if not (p.ndim < 2 or "logit_scale" in name)]
    return torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}], lr=1e-3
    )
