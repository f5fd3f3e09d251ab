"""Python values to JSON and back without loss: what optimizers and schedulers keep beside tensors.

JSON has no tuples, no infinities and no keys but strings; each of these becomes an object with one key that names its
type. All other types are refused: reading never makes an object of a class that a file names.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from planner.errors import InputError


def to_json(value: Any, place: str) -> Any:
    """Return `value` in JSON's types.

    Args:
        value: numbers, strings, None, tuples, lists, dicts and one-element tensors, nested in any way.
        place: what the value is, for the error.

    Raises:
        InputError: for a value of another type.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case tuple():
            return {"tuple": [to_json(item, place) for item in value]}
        case list():
            return [to_json(item, place) for item in value]
        case dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[to_json(key, place), to_json(item, place)] for key, item in value.items()]}
        case Tensor() if value.numel() == 1:
            # Exact for every floating-point dtype: a Python float is a float64, and JSON keeps all its digits.
            return {
                "tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), to_json(value.item(), place)]
            }
        case _:
            raise InputError(
                f"{place} is a {type(value).__name__}, which a checkpoint cannot hold",
                hint="a state_dict() of numbers, strings, tuples, lists, dicts and tensors can be saved",
            )


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given; raise ValueError when `to_json` cannot have returned `value`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [from_json(item) for item in value]
        case {"float": str(text)}:
            return float(text)
        case {"tuple": list(items)}:
            return tuple(from_json(item) for item in items)
        case {"dict": list(pairs)}:
            return {from_json(key): from_json(item) for key, item in pairs}
        case {"counter": list(pairs)}:
            return Counter({from_json(key): from_json(item) for key, item in pairs})
        case {"tensor": [str(dtype), list(shape), item]} if isinstance(getattr(torch, dtype, None), torch.dtype):
            return torch.tensor(from_json(item), dtype=getattr(torch, dtype)).reshape(shape)
        case _:
            raise ValueError(f"{value!r} is not a value of a checkpoint")
