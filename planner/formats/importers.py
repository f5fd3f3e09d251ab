"""Read a profile in any of the known formats, told apart by content."""

import json
from contextlib import suppress
from pathlib import Path

from planner.errors import InputError
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.pipedream import is_graph_txt, load_graph_txt
from planner.formats.profile import Profile, load_profile


def read_profile(path: Path | str) -> Profile:
    """Read a profile: our own JSON, or PipeDream's graph.txt; raise ProfileError if it is neither.

    Example:
        >>> planner.load_profile("profiles/vgg16/cpu.json").microbatch_size
        32
    """
    path = Path(path)
    return load_graph_txt(path) if is_graph_txt(path) else load_profile(path)


def read_profiles(text: str) -> list[Profile]:
    """Read FILE, FILE,FILE of several batch sizes, or NAME=FILE,NAME=FILE of kinds of devices as one profile."""
    parts = [part.rpartition("=") for part in text.split(",")]
    if Path(text).exists():
        return [read_profile(text)]
    if "=" not in text:
        return [read_profile(path) for _, _, path in parts]
    names = [name for name, _, _ in parts]
    if "" in names or len(set(names)) < len(names):
        raise InputError(
            f"`profile={text}` does not name each kind of GPU once", hint="write NAME=FILE,NAME=FILE, as in a100=a.json"
        )
    return [profile_of_kinds({name: read_profile(path) for name, _, path in parts})]


def read_one_profile(text: str) -> Profile:
    """Read one profile, which may be of several kinds of devices; raise InputError for several batch sizes."""
    first, *others = read_profiles(text)
    if others:
        raise InputError(
            f"`profile={text}` are {len(others) + 1} profiles, and this verb takes one",
            hint="name the kinds of GPUs that they are of, as in a100=a.json,t4=b.json; or give one",
        )
    return first


def is_profile(path: Path) -> bool:
    with suppress(OSError, ValueError):  # loading it will say what is wrong
        content: object = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "layers" in content and "stages" not in content:
            return True
    return is_graph_txt(path)
