"""Run PyTorch models that do not fit the device, by streaming their weights.

Examples
--------
>>> handle = dynswap_ext.install(model, device="cuda", budget="6GiB")  # doctest: +SKIP
>>> y = model(x)                                                       # doctest: +SKIP
>>> dynswap_ext.uninstall(model)                                       # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynswap_ext import integrations  # noqa: F401  (what it knows is used from the first install on)
from dynswap_ext._provider import BackendInfo, backend_info
from dynswap_ext._tuning import Tuning
from dynswap_ext._version import __version__
from dynswap_ext.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    DynswapError,
    DynswapWarning,
    OutOfMemoryError,
    SourceError,
)
from dynswap_ext.handle import Handle
from dynswap_ext.install import install, is_installed, uninstall
from dynswap_ext.profile.stats import Stats

if TYPE_CHECKING:
    from dynswap_ext import checkpoint, inspect, testing

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
