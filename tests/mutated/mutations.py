"""Changes of JSON files, drawn by seed: what a hand, a broken disk or another program could leave
there.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

DEPTH = 20_000  # of nested lists, far beyond what parsers that recurse can take

# In place of a leaf.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2,
    7,
    10**5,
    10**9,
    2**31,
    2**53,
    2**63,
    10**30,
    -(10**30),
    0.5,
    -0.5,
    1e-300,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    "",
    "a",
    "../../x",
    "²",
    "\x1b[31mred",
    "x" * 5000,
    [],
    {},
    [[]],
    [1, 2, 3],
    {"a": 1},
)
# In place of a number.
FACTORS = (0, -1, 2, 1e-9, 1e9, 1e30)

Text = str


def mutated(text: Text, generator: random.Random) -> Text:
    """Return the text of a file with one to three changes."""
    content = json.loads(text)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        change = generator.choice(_CHANGES)
        content = change(content, generator)
    written = json.dumps(content)

    if generator.random() < 0.15:
        return generator.choice(_TEXT_CHANGES)(written, generator)
    return written


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Return each place in a tree of lists and dicts, as what holds it and its key."""
    found: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return found


def _place(content: Any, generator: random.Random) -> tuple[Any, Any] | None:
    places = _places(content) if isinstance(content, (dict, list)) else []
    return generator.choice(places) if places else None


def _replace(content: Any, generator: random.Random) -> Any:
    if (place := _place(content, generator)) is not None:
        place[0][place[1]] = copy.deepcopy(generator.choice(ODD_VALUES))
    return content


def _scale(content: Any, generator: random.Random) -> Any:
    numbers = [
        (holder, key)
        for holder, key in _places(content)
        if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool)
    ]
    if numbers:
        holder, key = generator.choice(numbers)
        scaled = holder[key] * generator.choice(FACTORS)
        whole = isinstance(holder[key], int) and abs(scaled) < 1e40
        holder[key] = int(scaled) if whole else scaled
    return content


def _remove(content: Any, generator: random.Random) -> Any:
    if (place := _place(content, generator)) is not None:
        del place[0][place[1]]
    return content


def _repeat(content: Any, generator: random.Random) -> Any:
    lists = [holder for holder, _ in _places(content) if isinstance(holder, list) and holder]
    if lists:
        chosen = generator.choice(lists)
        chosen.insert(generator.randrange(len(chosen) + 1), copy.deepcopy(generator.choice(chosen)))
    return content


def _swap(content: Any, generator: random.Random) -> Any:
    lists = [
        holder for holder, _ in _places(content) if isinstance(holder, list) and len(holder) > 1
    ]
    if lists:
        chosen = generator.choice(lists)
        one, other = generator.sample(range(len(chosen)), 2)
        chosen[one], chosen[other] = chosen[other], chosen[one]
    return content


def _exchange(content: Any, generator: random.Random) -> Any:
    one, other = _place(content, generator), _place(content, generator)
    if one is not None and other is not None:
        value = copy.deepcopy(other[0][other[1]])
        one[0][one[1]] = value
    return content


def _add(content: Any, generator: random.Random) -> Any:
    dicts = [holder for holder, _ in _places(content) if isinstance(holder, dict)]
    if dicts:
        generator.choice(dicts)[generator.choice(("new", "stages", "layers", "minibatch"))] = 1
    return content


_CHANGES: tuple[Callable[[Any, random.Random], Any], ...] = (
    _replace,
    _replace,
    _replace,
    _scale,
    _scale,
    _remove,
    _repeat,
    _swap,
    _exchange,
    _add,
)


def _truncate(text: Text, generator: random.Random) -> Text:
    return text[: generator.randrange(len(text))]


def _flip(text: Text, generator: random.Random) -> Text:
    at = generator.randrange(len(text))
    return text[:at] + chr(generator.randrange(1, 0x300)) + text[at + 1 :]


def _nest(text: Text, generator: random.Random) -> Text:
    key = json.loads(text)
    name = generator.choice(list(key)) if isinstance(key, dict) and key else "a"
    return "{" + json.dumps(name) + ": " + "[" * DEPTH + "]" * DEPTH + "}"


def _double_key(text: Text, generator: random.Random) -> Text:
    content = json.loads(text)
    if not isinstance(content, dict) or not content:
        return text
    name = generator.choice(list(content))
    return "{" + f"{json.dumps(name)}: 1, " + text[1:]


_TEXT_CHANGES: tuple[Callable[[Text, random.Random], Text], ...] = (
    _truncate,
    _flip,
    _nest,
    _double_key,
)
