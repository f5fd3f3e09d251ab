"""The options under which stages run: autocast, memory format, compilation."""

from __future__ import annotations

from planner.formats.plan import Plan
from planner.formats.profile import Profile


def options_words(record: Profile | Plan) -> str:
    """List the options that are set: "autocast to bfloat16, channels-last, compiled"; empty without any."""
    autocast = f"autocast to {record.autocast}" if record.autocast else None
    words = (autocast, record.memory_format, "compiled" if record.compiled else None)
    return ", ".join(word for word in words if word)
