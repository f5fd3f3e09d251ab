"""Runs `benchmarks.same_answers.answers`."""

from __future__ import annotations

import sys

from benchmarks.same_answers.answers import main

if __name__ == "__main__":
    sys.exit(main())
