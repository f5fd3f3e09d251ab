"""What people ask for: each option once, as a field of a record.

The field's default and help make the flag of the command line, the keyword of the public function and its line in the
docstring; messages of the library name it in backticks, which the command line prints as the flag.

    option     a field with its help, and public functions that take a record's fields as keywords
    solving    which plan to search for
    training   how to train, which checkpoints to write, how to watch the run
    profiling  how to measure or estimate a model
    numbers    what the texts of flags are parsed with

No module here imports torch, pydantic or numpy, so that the help shows at once.
"""
