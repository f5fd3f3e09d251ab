"""How far searches look, how long, and how near counts as equal: one record, which the question
carries.
"""
