"""Instruction streams + costs -> times, without running anything."""
