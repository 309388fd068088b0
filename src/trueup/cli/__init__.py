"""The command line. One file per family of commands; `app` is the only place that knows them all.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a verdict failed, 2 wrong
usage, 3 a run stopped by a fault, 130 and 143 interrupted after a checkpoint.
"""

from trueup.cli.app import main

__all__ = ["main"]
