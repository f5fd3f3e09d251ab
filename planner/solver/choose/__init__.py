"""Choose the answer: plans that take no search, alternatives that may wait less, local search from
the best.
"""
