"""LayerGraph on a device -> Profile, and the speed of the links between workers."""
