"""``python -m dynswap_ext``: the same as ``dynswap``."""

import sys

from dynswap_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
