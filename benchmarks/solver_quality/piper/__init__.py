"""Are plans for the graphs of Piper as fast as its own? See README.md in this folder."""
