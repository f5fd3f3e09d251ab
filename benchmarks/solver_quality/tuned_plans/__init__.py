"""Can the planner express and price published tuned plans, and find better ones? See README.md in
this folder.
"""
