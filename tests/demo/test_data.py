"""The datasets that come with the package."""

from __future__ import annotations

import torch

from planner.demo.data import Digits, LibraryText, library_bytes


def test_digits_are_centred_images_of_ten_classes() -> None:
    digits = Digits(16)
    assert len(digits) == 1797
    image, label = digits[0]
    assert image.shape == (3, 16, 16)
    assert image.dtype == torch.float32
    images = torch.stack([digits[index][0] for index in range(len(digits))])
    assert images.mean().abs() < 1e-3
    assert 0.5 < images.std() < 1.5
    assert label.dtype == torch.int64
    assert {int(digits[index][1]) for index in range(50)} == set(range(10))


def test_text_is_followed_by_itself() -> None:
    text = LibraryText(32)
    assert len(text) > 10_000
    for index in (0, 7, len(text) - 1):
        before, after = text[index]
        assert before.shape == after.shape == (32,)
        assert torch.equal(before[1:], after[:-1])
    assert torch.equal(text[0][0], library_bytes()[:32].long())
    assert bytes(library_bytes()[:2000].tolist()).isascii()
