"""Provide real training data without a download: scikit-learn's digits and the Python library's own
sources.
"""

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from planner.errors import PlannerError

BYTES = 256  # vocabulary of byte-level text
_TEXT_FILES = 150
_STRIDE = 32  # bytes between the starts of two samples


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits (Alpaydin & Kaynak 1998): images (3, size, size) of mean 0 and deviation
    1, and classes.
    """

    def __init__(self, size: int) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise PlannerError(
                "the digits are part of scikit-learn, which is not installed",
                hint="pip install 'scikit-learn>=1.4'",
            ) from None

        images, classes = load_digits(return_X_y=True)
        small = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
        small = small - small.mean(dim=0)
        small = small / small.std()
        self._images = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
        self._classes = torch.tensor(classes, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index].expand(3, -1, -1), self._classes[index]


class LibraryText(Dataset[tuple[Tensor, Tensor]]):
    """The standard library's sources byte by byte: a text, int64 (length,), and the same one byte
    later.
    """

    def __init__(self, length: int) -> None:
        self._text = library_bytes()
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - self._length - 1) // _STRIDE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * _STRIDE :][: self._length + 1].long()
        return window[:-1], window[1:]


@lru_cache(maxsize=1)
def library_bytes() -> Tensor:
    """Return the first modules of the standard library by name, as one uint8 tensor."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_TEXT_FILES]
    if not files:
        problem = "this Python comes without the sources of its standard library"
        raise PlannerError(problem, hint="give the model file its own dataset()")
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )
