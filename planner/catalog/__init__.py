"""Models by name: what transformers builds from a configuration, as a model file that every verb
takes.
"""
