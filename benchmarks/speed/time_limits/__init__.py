"""Is a time limit kept on the wall clock? See README.md in this folder."""
