"""Does everything work on this machine? See README.md in this folder."""
