"""Check on any machine that planning and training work: `plan selftest`.

`run` goes from options to the report and lists the checks, which `machine`, `cuts` and `training` define. `models` has
what they train, in a file like a user's.
"""
