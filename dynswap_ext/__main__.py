"""Runs the command line, ``dynswap``, as ``python -m dynswap_ext``."""

import sys

from dynswap_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
