"""How workers start, choose their devices, find each other, watch each other and end."""
