"""What a search is asked: the problem with its limits and budget, the states of the cuts, bounds,
and the answer.
"""
