"""DETR of transformers: queries are matched to boxes by the Hungarian algorithm, so the loss
decides by values.
"""

import torch
from made_up import Samples
from torch import nn
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

SIZE, BOXES, CLASSES = 64, 3, 5


class Detector(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.detr = DetrForObjectDetection(config)

    def forward(self, pixels, classes, boxes):
        labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
        return self.detr(pixel_values=pixels, labels=labels)


def build_model():
    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    return Detector(
        DetrConfig(
            backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, d_model=32,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=6, num_labels=CLASSES, dropout=0.0,
        )
    )  # fmt: skip


def example_batch(batch_size):
    boxes = torch.rand(batch_size, BOXES, 4) * 0.4 + 0.1
    return (
        torch.randn(batch_size, 3, SIZE, SIZE),
        torch.randint(0, CLASSES, (batch_size, BOXES)),
        boxes,
    ), None


def sample(generator):
    boxes = torch.rand(BOXES, 4, generator=generator) * 0.4 + 0.1
    classes = torch.randint(0, CLASSES, (BOXES,), generator=generator)
    return (torch.randn(3, SIZE, SIZE, generator=generator), classes, boxes), None


def dataset():
    return Samples(sample, 36)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
