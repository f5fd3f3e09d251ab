"""Compare training in buckets of similar length with padding to the longest, predicted and on
emulated devices.
"""
