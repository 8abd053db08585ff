"""The package's logger, "dynswap_ext": silent unless the program, or ``DYNSWAP_LOG``, asks for it.

An access to a weight logs nothing, to stay fast.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

logger: Final = logging.getLogger("dynswap_ext")
logger.addHandler(logging.NullHandler())


class _ToStderr(logging.Handler):
    """Writes to `sys.stderr` as it is at that moment, because programs and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


_to_stderr: Final = _ToStderr()
_to_stderr.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))


def log_to_stderr(level: int | None) -> None:
    """Show log messages of this level of `logging` and above on stderr; None stops that."""
    if level is not None:
        logger.addHandler(_to_stderr)
        logger.setLevel(level)
    elif _to_stderr in logger.handlers:
        logger.removeHandler(_to_stderr)
        logger.setLevel(logging.NOTSET)
