"""The verbs of the command line as functions.

planning   what needs no PyTorch: solve, price, show, report ...
running    what runs PyTorch: profile, estimate, fit, train, and what a machine is tried out with
"""
