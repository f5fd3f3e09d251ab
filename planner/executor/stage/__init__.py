"""What a worker keeps for each of its stages beside the layers: weight versions, optimizer, loss
scale, statistics.
"""
