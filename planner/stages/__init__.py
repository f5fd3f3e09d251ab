"""What a stage may choose beside its layers, one file per choice, and the questions that others ask
about it.
"""
