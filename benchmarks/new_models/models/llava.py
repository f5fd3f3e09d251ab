"""LLaVA: a frozen tower of vision in eval mode, whose patches take the places of words; answers
alone have labels.
"""

import torch
from made_up import IGNORED, Samples
from schedules import by_factor, cosine_after_warm_up
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

WORDS, TEXT, PATCHES, IMAGE = 128, 16, 4, 127


def build_model():
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        image_size=16, patch_size=8,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=WORDS, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    )
    tower = model.model.vision_tower
    tower.requires_grad_(False)
    tower.eval()
    return model


def arguments(words, images):
    """Put the image before the text, whose second half is the answer."""
    places = torch.full((*words.shape[:-1], PATCHES), IMAGE)
    answers = torch.cat(
        [torch.full_like(words[..., : TEXT // 2], IGNORED), words[..., TEXT // 2 :]], -1
    )
    labels = torch.cat([torch.full_like(places, IGNORED), answers], -1)
    labels = labels.where(labels != 0, IGNORED)
    return {"input_ids": torch.cat([places, words], -1), "pixel_values": images, "labels": labels}


def example_batch(batch_size):
    words = torch.randint(1, IMAGE, (batch_size, TEXT))
    return (), arguments(words, torch.randn(batch_size, 3, 16, 16)), None


def sample(generator):
    words = torch.randint(1, IMAGE, (TEXT,), generator=generator)
    used = int(torch.randint(TEXT // 2 + 1, TEXT + 1, (), generator=generator))
    words = words.where(torch.arange(TEXT) < used, 0)
    return (), arguments(words, torch.randn(3, 16, 16, generator=generator)), None


def dataset():
    return Samples(sample, 48)  # the tower is captured for one size of microbatches


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)


def scheduler(optimizer):
    return by_factor(optimizer, cosine_after_warm_up())
