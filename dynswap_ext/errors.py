"""The errors that this package raises. The native extension raises the same classes."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "DynswapError",
    "DynswapWarning",
    "OutOfMemoryError",
    "ShortfallError",
    "SourceError",
]


class DynswapError(RuntimeError):
    """The base class of all errors of this package."""


class ConfigError(DynswapError, ValueError):
    """An option or an environment variable has a value that cannot be used."""


class BudgetError(DynswapError, ValueError):
    """The budget cannot hold the weights that must be on the device at one time.

    Attributes
    ----------
    smallest_bytes : int
        The smallest budget, in bytes, that would have worked; 0 if it is not known. With
        ``strict_budget=True``, a read of a weight raises the error if tensors that you keep fill the budget.
        In that case, this is a budget that has room for the weight, too.
    """

    def __init__(self, message: str, smallest_bytes: int = 0) -> None:
        super().__init__(message)
        self.smallest_bytes = int(smallest_bytes)

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.smallest_bytes)


class SourceError(DynswapError, OSError):
    """A checkpoint or a weight in it cannot be read: a file is gone, damaged or changed, or a disk fails."""


class DeviceError(DynswapError):
    """The device reported an error, or is missing."""


class OutOfMemoryError(DynswapError):
    """Device memory could not be allocated."""


class ShortfallError(DynswapError):
    """An install does less than it was asked for. `Handle.check` raises this."""


class DynswapWarning(UserWarning):
    """The category of all warnings of this package."""
