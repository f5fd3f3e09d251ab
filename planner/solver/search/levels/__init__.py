"""Search on clusters of several levels of links."""
