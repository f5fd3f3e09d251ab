"""Plans that compete with what one search finds, or stand beside it: other schedules, usual ways,
fewer hosts.
"""
