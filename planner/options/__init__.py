"""What people ask for: each option once, as a field of a record.

The field's default and help make the flag of the command line, the keyword of the public function
and its line in the docstring. No module here imports torch, pydantic or numpy, so that the help
shows at once.

cyclopts 5.5 and tyro 1.0 make flags of dataclasses, too. Three verbs written with cyclopts took the
place of some 90 lines here and in `cli`, of 550. What they do not have would stay: keyword
arguments of Python functions with a signature that type checkers see, a short help beside a long
one without other names of flags, defaults in words, errors with hints. And either takes 0.2 s to
import, where argparse takes 0.02 s.
"""
