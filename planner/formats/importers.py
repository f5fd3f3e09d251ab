"""Read a profile in any of the known formats, told apart by content."""

from __future__ import annotations

import json
from pathlib import Path

from planner.formats.pipedream import is_graph_txt, load_graph_txt
from planner.formats.profile import Profile, load_profile


def read_profile(path: Path | str) -> Profile:
    """Read a profile: our own JSON, or PipeDream's graph.txt.

    Raises:
        ProfileError: naming the file and what is wrong in it.
    """
    path = Path(path)
    return load_graph_txt(path) if is_graph_txt(path) else load_profile(path)


def is_profile(path: Path) -> bool:
    """Return whether the file looks like a profile of any format rather than a plan."""
    if is_graph_txt(path):
        return True
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # loading it will say what is wrong
    return isinstance(content, dict) and "layers" in content and "stages" not in content
