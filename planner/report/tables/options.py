"""How stages run, in a few words."""

from __future__ import annotations

from planner.formats.plan import Plan
from planner.formats.profile import Profile


def options_words(record: Profile | Plan) -> str:
    """Such as "autocast to bfloat16, channels-last, compiled"; empty where nothing was asked for."""
    autocast = f"autocast to {record.autocast}" if record.autocast else None
    words = (autocast, record.memory_format, "compiled" if record.compiled else None)
    return ", ".join(word for word in words if word)
