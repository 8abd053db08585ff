"""Runs PyTorch models that do not fit the device, by streaming their weights.

>>> handle = dynswap_ext.install(model, device="cuda", budget="6GiB")  # doctest: +SKIP
>>> y = model(x)                                                       # doctest: +SKIP
>>> dynswap_ext.uninstall(model)                                       # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import integrations  # noqa: F401  (what it knows is used from the first install on)
from ._provider import BackendInfo, backend_info
from ._stats import Stats
from ._tuning import Tuning
from ._version import __version__
from .errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    DynswapError,
    DynswapWarning,
    OutOfMemoryError,
    SourceError,
)
from .handle import Handle
from .install import install, is_installed, uninstall

if TYPE_CHECKING:
    from . import checkpoint, inspect, testing

__all__ = [
    "BackendInfo",
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "DynswapError",
    "DynswapWarning",
    "Handle",
    "OutOfMemoryError",
    "SourceError",
    "Stats",
    "Tuning",
    "__version__",
    "backend_info",
    "checkpoint",
    "inspect",
    "install",
    "is_installed",
    "testing",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Import these when they are first used: not everybody needs what they import."""
    if name in ("checkpoint", "inspect", "testing"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
