"""Check on any machine that planning and training work: `plan selftest`.

`run` has the way from options to report, `registry` the list of checks. Each file in `checks/` is one check, which
yields cases; a case that ran is a row of the report. `models/` has the small models that the checks train, in files
like a user's, and `workers/` what some cases run in processes of their own.
"""
