"""Cost models, one file each: the time and memory of a plan under a schedule. `registry` lists
them.
"""
