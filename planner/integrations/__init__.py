"""Trainers of other packages whose model is a pipeline. They need those packages installed."""
