"""Turn a LayerGraph and a device into a Profile, and measure the links between workers."""
