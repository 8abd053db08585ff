"""The package's logger, "dynswap_ext": silent unless the program, or ``DYNSWAP_LOG``, asks for it.

Nothing is logged where weights are accessed.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

logger: Final = logging.getLogger("dynswap_ext")
logger.addHandler(logging.NullHandler())


class _ToStderr(logging.Handler):
    """Writes to what stderr is by then, as programs and tests exchange it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


_to_stderr: Final = _ToStderr()
_to_stderr.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))


def log_to_stderr(level: int | None) -> None:
    """Log to stderr from a level of `logging` on; None ends what an earlier call has begun."""
    if level is not None:
        logger.addHandler(_to_stderr)
        logger.setLevel(level)
    elif _to_stderr in logger.handlers:
        logger.removeHandler(_to_stderr)
        logger.setLevel(logging.NOTSET)
