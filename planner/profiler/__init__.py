"""LayerGraph on a device -> Profile."""
