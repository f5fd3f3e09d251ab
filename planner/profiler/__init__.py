"""LayerGraph on a device -> Profile, and the speed of the link between two processes."""

from planner.profiler.profile import profile_model

__all__ = ["profile_model"]
