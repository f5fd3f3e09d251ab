"""How far are estimates and prices from published runs on real GPUs? See README.md in this
folder.
"""
