"""Pieces of streams that several schedules share, and streams made from them: segments and evaluation."""
