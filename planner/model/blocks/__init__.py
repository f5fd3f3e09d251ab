"""Models made of repeated blocks: capture one block, check that the others are equal, build stages of blocks."""
