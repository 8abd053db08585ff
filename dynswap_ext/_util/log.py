"""The package's logger, "dynswap_ext": silent unless the program, or ``DYNSWAP_LOG``, asks for it.

Nothing is logged where weights are accessed.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

__all__ = ["log_to_stderr", "logger"]

logger: Final = logging.getLogger("dynswap_ext")
logger.addHandler(logging.NullHandler())


class _ToStderr(logging.Handler):
    """Writes to what stderr is by then, as programs and tests exchange it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_stderr(level: int | None) -> None:
    """Log to stderr from a level on, or stop doing so.

    Parameters
    ----------
    level : int or None
        A level of `logging`; None removes what an earlier call has added.
    """
    own = next((handler for handler in logger.handlers if isinstance(handler, _ToStderr)), None)
    if level is None:
        if own is not None:
            logger.removeHandler(own)
            logger.setLevel(logging.NOTSET)
        return
    if own is None:
        logger.addHandler(_ToStderr())
    logger.setLevel(level)
