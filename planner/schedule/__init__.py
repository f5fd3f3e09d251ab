"""Schedules as data: one stream of instructions per worker, read by the simulator and the executor
alike. No torch.
"""
