"""How a stage runs, beside which layers it has."""

from __future__ import annotations

from typing import Literal

# Whether stages keep what their backward needs, or run their forward again: where memory demands it, never, always.
RecomputeRule = Literal["auto", "never", "always"]
