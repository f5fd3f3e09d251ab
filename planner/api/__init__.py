"""The verbs of the command line as functions: those that need no PyTorch, and those that run it."""
