"""What people ask for: each option once, as a field of a record.

The field's default and help make the flag of the command line, the keyword of the public function
and its line in the docstring. No module here imports torch, pydantic or numpy, so that the help
shows at once.
"""
