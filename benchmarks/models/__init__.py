"""Models of many kinds: capture, exactness of a split, and the sum of the layers' times."""
