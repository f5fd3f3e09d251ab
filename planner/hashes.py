"""Texts hash alike in all processes that run a model file, so that they go through a set in the
same order.

Some models make their operations, or number their labels, in such an order. A profile would then be
of another graph than the one that workers capture, and workers would have graphs or labels that
differ.
"""

import os
import sys

VARIABLE = "PYTHONHASHSEED"
SEED = "0"


def fix_hashes() -> None:
    """Start this process anew with the hashes that workers have, unless its environment says how to
    hash.

    Python reads the variable when it starts.
    """
    if VARIABLE in os.environ or not sys.executable:
        return
    os.environ[VARIABLE] = SEED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
